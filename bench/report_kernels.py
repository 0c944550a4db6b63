#!/usr/bin/env python3
"""Writes the tables and the plot of docs/performance.md from fp8kv_kernel_bench's JSON.

usage: bench/report_kernels.py [--check]
Reads kernels_h200.json and prototype_h200.json of docs/measurements; replaces what stands between
the markers of the document and writes the plot beside the JSON. With --check it changes nothing and
fails if either differs.
"""
import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
JSON = ROOT / "docs/measurements/kernels_h200.json"
PROTOTYPE = ROOT / "docs/measurements/prototype_h200.json"
PLOT = ROOT / "docs/measurements/kernels_h200.svg"
DOC = ROOT / "docs/performance.md"
BEGIN = "<!-- from bench/report_kernels.py -->"
END = "<!-- end -->"

# name, batch, kv_len, q_heads, kv_heads, best paged rival (fp8, bf16) in us; docs/performance.md
# says whose they are and how they were measured.
NAMED = [
    ("A", 128, 2048, 64, 8, 130.7, 248), ("B", 1, 262144, 32, 4, 69.6, 132),
    ("C", 32, 32768, 8, 1, 69.5, 132), ("D", 64, 128, 64, 8, 9.4, 15.4),
    ("E", 1, 1024, 64, 8, 6.7, 7.3), ("F77", 16, 77, 16, 2, 4.6, 5.1),
    ("F512", 16, 512, 16, 2, 6.5, 8.3), ("F2048", 16, 2048, 16, 2, 11.2, 13.9),
    ("F8192", 16, 8192, 16, 2, 24.0, 39.5), ("G", 64, 8192, 64, 8, 255, 488),
    ("H", 32, [65536] + [4096] * 31, 64, 8, 101.6, 198), ("I", 1, 131072, 64, 8, 69.7, 131),
]

# At most, in us, on the machine of the prototype's reference_us (fp8, bf16).
WANTED = {"A": (126, 240), "B": (65.5, 123), "C": (65.5, 123), "D": (7.5, 10), "E": (4.5, 4.8),
          "F77": (2.4, 2.4), "F512": (4.0, 4.8), "F2048": (9.0, 11.8), "F8192": (20.5, 35),
          "G": (246, 475), "H": (96, 191), "I": (65.5, 123)}


def key(cell):
    kv_len = cell["kv_len"]
    return (cell["batch"], tuple(kv_len) if isinstance(kv_len, list) else kv_len, cell["q_heads"],
            cell["kv_heads"], cell["head_dim"], cell["q_len"])


def pairs(cells):
    """{shape: {precision: cell}} in the order of the file."""
    result = {}
    for cell in cells:
        result.setdefault(key(cell), {})[cell["precision"]] = cell
    return result


def named_shape(batch, kv_len, q_heads, kv_heads):
    lens = tuple(kv_len) if isinstance(kv_len, list) else kv_len
    return (batch, lens, q_heads, kv_heads, 128, 1)


def named_table(data, shapes):
    rows = ["| cell | sequences x tokens | heads | fp8_kv us | of the roof | best rival | bf16 us "
            "| of the roof | best rival | fp8_kv / bf16 |",
            "|---|---|---|---|---|---|---|---|---|---|"]
    for name, batch, kv_len, q_heads, kv_heads, rival_fp8, rival_bf16 in NAMED:
        both = shapes[named_shape(batch, kv_len, q_heads, kv_heads)]
        fp8, bf16 = both["fp8_kv"], both["bf16"]
        size = f"{batch} x {kv_len}" if isinstance(kv_len, int) else "1 x 65536 + 31 x 4096"
        rows.append(f"| {name} | {size} | {q_heads}/{kv_heads} | {fp8['us']:.2f} "
                    f"| {fp8['gbps'] / data['roof_gbps']:.3f} | {rival_fp8} | {bf16['us']:.2f} "
                    f"| {bf16['gbps'] / data['roof_gbps']:.3f} | {rival_bf16} "
                    f"| {fp8['us'] / bf16['us']:.3f} |")
    return rows


def wanted_table(shapes, prototype):
    """The named cells beside what was wanted, as if on the machine that this was wanted on."""
    ties = {(c["name"], c["precision"]): c for c in prototype["cells"]}
    rows = ["| cell | precision | us | prototype here | there | so ours there | wanted |",
            "|---|---|---|---|---|---|---|"]
    for name, batch, kv_len, q_heads, kv_heads, _, _ in NAMED:
        both = shapes[named_shape(batch, kv_len, q_heads, kv_heads)]
        for precision, wanted in zip(("fp8_kv", "bf16"), WANTED[name]):
            us = both[precision]["us"]
            tie = ties.get((name, precision))
            tied = ("| | | " if tie is None else
                    f"| {tie['us']:.2f} | {tie['reference_us']} "
                    f"| {us * tie['reference_us'] / tie['us']:.2f}")
            rows.append(f"| {name} | {precision} | {us:.2f} {tied} | {wanted} |")
    return rows


def shape_table(data, shapes):
    """Groups, head dimensions and query tokens, at about 1.1 GB of fp8_kv."""
    rows = ["| head_dim | heads | query tokens | fp8_kv us | of the roof | bf16 us | of the roof "
            "| fp8_kv / bf16 |", "|---|---|---|---|---|---|---|---|"]
    for (batch, kv_len, q_heads, kv_heads, head_dim, q_len), both in shapes.items():
        elements = 0 if isinstance(kv_len, tuple) else batch * kv_len * kv_heads * head_dim
        if batch != 64 or abs(elements / (64 * 8192 * 8 * 128) - 1) > 0.02:
            continue
        fp8, bf16 = both["fp8_kv"], both["bf16"]
        rows.append(f"| {head_dim} | {q_heads}/{kv_heads} | {q_len} | {fp8['us']:.1f} "
                    f"| {fp8['gbps'] / data['roof_gbps']:.3f} | {bf16['us']:.1f} "
                    f"| {bf16['gbps'] / data['roof_gbps']:.3f} | {fp8['us'] / bf16['us']:.3f} |")
    return rows


def sustained_table(data, shapes):
    """The clocks that the board's power leaves after 0.6 s, beside those it has from rest."""
    rows = ["| head_dim | query tokens | fp8_kv us from rest | after 0.6 s | bf16 us from rest "
            "| after 0.6 s |", "|---|---|---|---|---|---|"]
    for shape, both in pairs(data["sustained"]).items():
        rest = shapes[shape]
        rows.append(f"| {shape[4]} | {shape[5]} "
                    f"| {rest['fp8_kv']['us']:.1f} | {both['fp8_kv']['us']:.1f} "
                    f"| {rest['bf16']['us']:.1f} | {both['bf16']['us']:.1f} |")
    return rows


def size_of(cell):
    lens = cell["kv_len"]
    return f"{cell['batch']} x " + (str(lens) if isinstance(lens, int)
                                    else f"{lens[-1]} to {lens[0]}")


def variant_table(data):
    names = {named_shape(b, k, q, h): n for n, b, k, q, h, _, _ in NAMED}
    rows = ["| cell | precision | default us | batch_invariant | generic (sm_80) kernels |",
            "|---|---|---|---|---|"]
    generic = {(key(c), c["precision"]): c for c in data["generic"]}
    for cell in data["batch_invariant"]:
        other = generic.get((key(cell), cell["precision"]))
        of_generic = "" if other is None else (
            f"{other['us']:.2f} ({other['us'] / other['default_us']:.2f}x) ")
        rows.append(f"| {names.get(key(cell), size_of(cell))} | {cell['precision']} "
                    f"| {cell['default_us']:.2f} "
                    f"| {cell['us']:.2f} ({cell['us'] / cell['default_us']:.2f}x) "
                    f"| {of_generic}|")
    return rows


def append_table(data):
    rows = ["| what | precision | us | |", "|---|---|---|---|"]
    for cell in data["step_with_append"]:
        rows.append(f"| decode of 64 x {cell['kv_len']} that appends a token to each "
                    f"| {cell['precision']} | {cell['us']:.2f} "
                    f"| {cell['us'] - cell['default_us']:+.2f} us against decode alone |")
    for cell in data["bulk_append"]:
        rows.append(f"| append {cell['seqs']} x {cell['tokens']} tokens, {cell['kv_heads']} heads, "
                    f"d{cell['head_dim']} | {cell['precision']} | {cell['us']:.1f} "
                    f"| {cell['gbps'] / data['copy_gbps']:.2f} of the copy roof |")
    return rows


def plot(data, shapes):
    """Share of the read roof over the bytes read, d128: points as SVG."""
    width, height, left, bottom = 760, 360, 60, 50
    low, high = 5, 10  # powers of ten of bytes
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
             'font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    x_of = lambda b: left + (math.log10(b) - low) / (high - low) * (width - left - 20)
    y_of = lambda s: height - bottom - s * (height - bottom - 20)
    for power in range(low, high + 1):
        x = x_of(10 ** power)
        lines.append(f'<line x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{height - bottom}" '
                     'stroke="#ddd"/>')
        lines.append(f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">'
                     f'1e{power}</text>')
    for tenth in range(0, 11, 2):
        y = y_of(tenth / 10)
        lines.append(f'<line x1="{left}" y1="{y:.1f}" x2="{width - 20}" y2="{y:.1f}" '
                     'stroke="#ddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}'
                     '</text>')
    colours = {"fp8_kv": "#c0392b", "bf16": "#2c6fbb"}
    for both in shapes.values():
        for precision, cell in both.items():
            if cell["head_dim"] != 128 or cell["q_len"] != 1 or cell["q_heads"] > 64:
                continue
            lines.append(f'<circle cx="{x_of(cell["gbps"] * cell["us"] * 1e3):.1f}" '
                         f'cy="{y_of(cell["gbps"] / data["roof_gbps"]):.1f}" r="3" '
                         f'fill="{colours[precision]}" fill-opacity="0.7"/>')
    for i, (precision, colour) in enumerate(colours.items()):
        lines.append(f'<circle cx="{left + 20}" cy="{32 + 18 * i}" r="4" fill="{colour}"/>')
        lines.append(f'<text x="{left + 30}" y="{36 + 18 * i}">{precision}, head_dim 128</text>')
    lines.append(f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">bytes of K and V '
                 'read by one decode</text>')
    lines.append(f'<text x="16" y="{height / 2}" text-anchor="middle" '
                 f'transform="rotate(-90 16 {height / 2})">share of the read roof</text></svg>')
    return "\n".join(lines) + "\n"


def report(data, prototype):
    shapes = pairs(data["cells"])
    note = " " + data["note"] if "note" in data else ""
    text = [BEGIN, "",
            f"Device {data['device']}, commit {data['commit']}, {data['date']}: reads "
            f"{data['roof_gbps']:.0f} GB/s, copies {data['copy_gbps']:.0f} GB/s.{note}",
            "", "![share of the read roof](measurements/kernels_h200.svg)", "",
            "### The named cells", ""]
    text += named_table(data, shapes)
    text += ["", "### Beside what was wanted", "",
             f"The prototype in the same call ({prototype['date']}).", ""]
    text += wanted_table(shapes, prototype)
    text += ["", "### Other shapes at about 1.1 GB of fp8_kv, 2.1 GB of bf16", ""]
    text += shape_table(data, shapes)
    text += ["", "What goes on without a rest, 64/8 heads:", ""] + sustained_table(data, shapes)
    text += ["", "### Other ways through the same cells", ""] + variant_table(data)
    text += ["", "### Append", ""] + append_table(data) + ["", END]
    return "\n".join(text)


def main():
    data = json.loads(JSON.read_text())
    doc = DOC.read_text()
    head, rest = doc.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    new_doc = head + report(data, json.loads(PROTOTYPE.read_text())) + tail
    new_plot = plot(data, pairs(data["cells"]))
    if "--check" in sys.argv[1:]:
        same = doc == new_doc and PLOT.exists() and PLOT.read_text() == new_plot
        sys.exit(0 if same else "docs/performance.md or its plot is not what the JSON says")
    DOC.write_text(new_doc)
    PLOT.write_text(new_plot)


if __name__ == "__main__":
    main()
