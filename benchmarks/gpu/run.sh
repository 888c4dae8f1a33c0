#!/usr/bin/env bash
# Everything that a GPU should answer: run.py says how. $PYTHON is the interpreter (`python`).
exec "${PYTHON:-python}" "$(cd "$(dirname "$0")" && pwd)/run.py" "$@"
