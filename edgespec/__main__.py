"""``python -m edgespec`` is the ``edgespec`` command."""

from edgespec.cli.main import main

if __name__ == "__main__":
    main()
