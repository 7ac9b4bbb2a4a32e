"""Symbols <-> ids. Id 0 is the null symbol (blank), which stands for no output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NULL = 0


class Alphabet:
    """An ordered set of symbols; their ids count from 1, because id 0 is null."""

    def __init__(self, symbols: Iterable[str]) -> None:
        self.symbols = tuple(symbols)
        for symbol in self.symbols:
            if not isinstance(symbol, str):
                raise TypeError(f"symbols must be text, not {symbol!r}")
        self._ids = {symbol: k for k, symbol in enumerate(self.symbols, start=1)}
        self._spellings: dict[str, str] = {}  # that `respell` has found
        if len(self._ids) != len(self.symbols):
            twice = next(s for i, s in enumerate(self.symbols) if s in self.symbols[:i])
            raise ValueError(f"the alphabet has {twice!r} twice; list each symbol once")

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """Return the ids of the symbols; split a string into its characters."""
        ids = []
        for position, symbol in enumerate(symbols):
            if symbol not in self._ids:
                raise ValueError(
                    f"{symbol!r}, at position {position}, is not among the alphabet's "
                    f"{len(self)} symbols"
                )
            ids.append(self._ids[symbol])
        return ids

    def encode_or_null(self, symbols: Iterable[str]) -> list[int]:
        """Return the ids of the symbols, respelt; null for a symbol that the alphabet lacks."""
        return [self._ids.get(symbol, NULL) for symbol in self.respell(symbols)]

    def respell(self, symbols: Iterable[str]) -> list[str]:
        """Replace each unknown symbol by a known spelling of it, if there is one.

        Try the lower case, then the upper case, then a plain apostrophe for a typographic one.
        """
        known = self._ids
        return [symbol if symbol in known else self._respell_symbol(symbol) for symbol in symbols]

    def unknown(self, symbols: Iterable[str]) -> list[str]:
        """Return the symbols, in order, that the alphabet lacks in every spelling."""
        return [symbol for symbol in self.respell(symbols) if symbol not in self._ids]

    def _respell_symbol(self, symbol: str) -> str:
        known = self._spellings.get(symbol)
        if known is None:
            plain = "'" if symbol == "\N{RIGHT SINGLE QUOTATION MARK}" else symbol
            spellings = (symbol.lower(), symbol.upper(), plain)
            known = next((spelling for spelling in spellings if spelling in self._ids), symbol)
            if known in self._ids:  # so that no more are kept than there are spellings
                self._spellings[symbol] = known
        return known

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Return the symbols of the ids, without nulls."""
        for position, k in enumerate(ids):
            if not 0 <= k <= len(self):
                raise ValueError(
                    f"id {k}, at position {position}, is not between 0 and {len(self)}"
                )
        return [self.symbols[k - 1] for k in ids if k != NULL]
