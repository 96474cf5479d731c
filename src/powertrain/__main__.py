"""``python -m powertrain``: the command line, where its own script is not on the path."""

from powertrain.cli.main import main

if __name__ == "__main__":
    main()
