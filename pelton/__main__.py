"""`python -m pelton`: the command, where its script is not on the PATH."""

from pelton.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
