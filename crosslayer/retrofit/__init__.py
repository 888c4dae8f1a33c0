"""Give a pretrained model another wiring, make up for what it loses, and say what it cost."""
