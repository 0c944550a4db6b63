"""Style as a test: python3 tests/tidy/tidy.py [ROOT] prints each finding; exits 1 if there is one.

A rule is a function of rules.py or structure.py; its name is the word that exceptions.txt uses. A
rule's fixture is a small tree in fixtures/<rule>/ that breaks it and no other.
"""

import inspect
import pathlib
import sys

import rules
import structure
from tree import Tree

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
RULES = {name: function for module in (rules, structure)
         for name, function in inspect.getmembers(module, inspect.isfunction)
         if function.__module__ == module.__name__ and not name.startswith("_")}
EXCEPTIONS = "tests/tidy/exceptions.txt"


def findings(tree):
    """All (rule, path, line, message), less the exceptions, plus the exceptions not needed."""
    exceptions = {}
    if EXCEPTIONS in tree.paths:
        for number, line in tree.lines(EXCEPTIONS):
            words = line.partition("#")[0].split()
            if words:
                exceptions[tuple(words)] = number
    unused = dict(exceptions)
    for rule, check in RULES.items():
        for path, line, message in check(tree):
            if (rule, path) in exceptions:
                unused.pop((rule, path), None)
            else:
                yield rule, path, line, message
    for words, number in unused.items():
        yield "exception", EXCEPTIONS, number, f"no longer needed: {' '.join(words)}"


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY
    tree = Tree.of_repository(root)
    found = sorted(set(findings(tree)), key=lambda f: (f[1], f[2]))
    for rule, path, line, message in found:
        print(f"{path}:{line}: {rule}: {message}")
    print(f"{len(RULES)} rules, {len(tree.paths)} files, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
