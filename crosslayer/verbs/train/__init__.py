"""Trains models from a recipe."""

GROUP = "Train"
NEXT = "crosslayer diagnose {out}/model --out diagnosis"
