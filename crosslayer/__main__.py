"""`python -m crosslayer`."""

from crosslayer.cli import main

if __name__ == "__main__":
    main()
