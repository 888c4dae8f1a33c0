"""What every result is written with: pages, figures, folders, manifests, progress."""
