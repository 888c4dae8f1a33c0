"""Output that all verbs share: pages, figures, folders, records, manifests, model cards, progress."""
