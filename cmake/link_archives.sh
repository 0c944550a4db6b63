#!/bin/sh
# Runs a link command with Abseil's archives in place of its shared libraries, which Debian's CMake
# files name. For programs that are carried to machines without Debian's packages.
for arg; do
  case $arg in
    */libabsl_*.so*) arg=${arg%.so*}.a ;;
  esac
  set -- "$@" "$arg"
  shift
done
exec "$@"
