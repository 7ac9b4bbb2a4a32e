"""The entry point of the command `transduce`, outside the package, whose import takes a second."""


def main() -> None:
    """Import the package and run its command; exit with 130 on Ctrl-C, also during the import."""
    try:
        from transduce.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()
