"""`python -m spectrain …`, also the entry point for `accelerate launch -m spectrain …`."""

from spectrain.cli import main

if __name__ == "__main__":
    main()
