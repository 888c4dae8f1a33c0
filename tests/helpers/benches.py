"""The shapes that hand counts and tests of whole benches share."""

from crosslayer.verbs.bench.run import bench

UNIATTN = [{"name": "uniattn", "superblocks": [[1, 2, 3]]}]
DROP = [{"name": "drop", "attention": [4, 5], "mlp": [0]}]
STATE = 2 * 8  # elements of the keys, or the values, of one token: H_kv · D
BYTES = 8  # float64


def short(candidate, baseline, context, new_tokens=1, repeats=1, **options):
    """Run a bench of a context, or several, with a single sequence."""
    contexts = context if isinstance(context, tuple) else (context,)
    return bench(candidate, baseline, contexts=contexts, new_tokens=new_tokens, repeats=repeats, **options)
