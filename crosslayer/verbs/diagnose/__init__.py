"""Measures every layer of a model, in one forward pass per sequence, and explains the results."""

GROUP = "Inspect"
OUT = "diagnosis"
NEXT = "crosslayer measure {model} --candidate int4 --candidate h2o:0.5 --out measured"
