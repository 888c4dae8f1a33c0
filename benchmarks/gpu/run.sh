#!/usr/bin/env bash
# Everything that a GPU should answer, the most important part first, in at most 12 minutes. Each part has a limit of its
# own and writes its JSON as it goes, so that one that fails or is stopped leaves what it had; a table comes last.
#
#     benchmarks/gpu/run.sh OUT [--dry-run]
#
# Nothing is downloaded or drawn: models have random weights in a real shape, or are trained here. $PYTHON is the
# interpreter (`python`), $TOKENS the file that `resformer.py --prepare` made; without it, nothing is trained.
# --dry-run runs every part on a CPU with tiny shapes.
set -uo pipefail
OUT=${1:?usage: benchmarks/gpu/run.sh OUT [--dry-run]}
DRY=${2:-}
HERE=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python}
mkdir -p "$OUT"
FAILED=0

part() { # NAME LIMIT COMMAND…: run a part, at most so many seconds
  local name=$1 limit=$2 started=$SECONDS
  shift 2
  if timeout "$limit" "$PYTHON" "$@" --json "$OUT/$name.json" ${DRY:+"$DRY"} >"$OUT/log" 2>&1; then
    echo "$name: done in $((SECONDS - started)) s"
  else
    FAILED=$((FAILED + 1))
    echo "$name: FAILED after $((SECONDS - started)) s of at most $limit; its last lines:"
    tail -5 "$OUT/log"
  fi
}

part depth_attention 80 "$HERE/depth_attention.py"
part training 120 "$HERE/steps.py" training
part serving 110 "$HERE/steps.py" serving
part stored_prompts 170 "$HERE/stored_prompts.py"
part diagnosis 70 "$HERE/diagnosis.py"
if [ -n "${TOKENS:-}${DRY}" ]; then
  part resformer 220 "$HERE/resformer.py" ${TOKENS:+--tokens "$TOKENS"}
fi
rm -f "$OUT/log"
"$PYTHON" "$HERE/table.py" "$OUT"
echo "$FAILED parts failed"
exit $((FAILED > 0))
