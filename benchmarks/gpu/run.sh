#!/usr/bin/env bash
# Everything that half an hour on a GPU should answer, the most important first; each part writes its file before the
# next begins, and one that fails is reported and passed over.
#
#     benchmarks/gpu/run.sh OUT [--dry-run]
#
# --dry-run runs every part on a CPU with tiny shapes, in some minutes. Python is $PYTHON, else `python`.
set -uo pipefail
OUT=${1:?usage: benchmarks/gpu/run.sh OUT [--dry-run]}
HERE=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python}
CROSSLAYER="$PYTHON -m crosslayer"
mkdir -p "$OUT"
MODEL=$OUT/model
if [ "${2:-}" = --dry-run ]; then
  DRY=--dry-run
  DEVICE="--device cpu"
  DECODER="--device cpu --pairs 2 --batch 1 --tokens 32 --only attnres"
  LONG=256 CONTEXTS=64 WINDOWS="--windows 96 --calibration 6 --length 64 --no-needles --no-alternatives"
  TRAIN="--set schedule.steps=4 --set schedule.warmup=1 --set eval.every=4 --set train.save_steps=4"
else
  DRY=
  DEVICE="--device cuda --dtype bfloat16"
  DECODER="--device cuda --dtype bfloat16"
  LONG=32768 CONTEXTS=2048,32768 WINDOWS="--windows 96 --length 512 --no-needles --no-alternatives"
  TRAIN="--set model.size=82M --set data.length=2048 --set train.per_device_train_batch_size=16 --set train.bf16=true
    --set schedule.steps=40 --set eval.every=40 --set train.save_steps=40"
fi
FAILED=0

part() { # NAME LIMIT COMMAND…: run a part, at most so many seconds
  local name=$1 limit=$2 started=$SECONDS
  shift 2
  echo "== $name: $*"
  if timeout "$limit" "$@" >"$OUT/$name.log" 2>&1; then
    echo "   done in $((SECONDS - started)) s"
  else
    FAILED=$((FAILED + 1))
    echo "   FAILED after $((SECONDS - started)) s; the end of $OUT/$name.log:"
    tail -5 "$OUT/$name.log"
  fi
}

# word splitting of $CROSSLAYER, $DEVICE and the like is wanted
part depth_attention 300 $PYTHON "$HERE/depth_attention.py" $DRY --json "$OUT/depth_attention.json"
part decoder 420 $PYTHON "$HERE/../decoder.py" $DECODER --json "$OUT/decoder.json"
part decoder_compiled 420 $PYTHON "$HERE/../decoder.py" $DECODER --compile --json "$OUT/decoder_compiled.json"
part model 120 $PYTHON "$HERE/random_model.py" "$MODEL" $DRY
part diagnose 180 $CROSSLAYER diagnose "$MODEL" --sequences 1 --length $LONG $DEVICE --out "$OUT/diagnose" --force
part retrofit 240 $CROSSLAYER retrofit "$MODEL" --method cla --layers 1-2 $WINDOWS $DEVICE --out "$OUT/retrofit" --force
part bench 180 $CROSSLAYER bench "$OUT/retrofit" --baseline "$MODEL" --contexts $CONTEXTS --new-tokens 8 $DEVICE \
  --out "$OUT/bench" --force
if $PYTHON -c "import vllm" 2>/dev/null && [ -z "$DRY" ]; then
  part vllm 300 $CROSSLAYER bench "$OUT/retrofit" --baseline "$MODEL" --engine vllm --kv-memory 2 $DEVICE \
    --out "$OUT/vllm" --force
fi
train() { # NAME OPTION…
  part "train_$1" 180 $CROSSLAYER train smoke $TRAIN "${@:2}" --out "$OUT/train_$1"
}
train plain
train attnres --set model.method=attnres
train attnres_blocks --set "model.method={name: attnres, block: 2}"
echo "$FAILED parts failed"
exit $((FAILED > 0))
