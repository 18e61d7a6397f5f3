"""The name of tandem.library up to version 0.2; it goes in the next."""

from tandem.library import Library, TandemError

__all__ = ["Library", "TandemError"]
