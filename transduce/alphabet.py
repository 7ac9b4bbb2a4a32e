"""Symbols and their ids. The null symbol, which stands for no output, is id 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NULL = 0


class Alphabet:
    """An ordered set of symbols: the first has id 1, because id 0 is null."""

    def __init__(self, symbols: Iterable[str]) -> None:
        self.symbols = tuple(symbols)
        self._ids = {symbol: k for k, symbol in enumerate(self.symbols, start=1)}
        if len(self._ids) != len(self.symbols):
            twice = next(s for i, s in enumerate(self.symbols) if s in self.symbols[:i])
            raise ValueError(f"the alphabet has {twice!r} twice")

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """The ids of the symbols; a string is taken letter by letter."""
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
        """The ids of the symbols, respelt where need be, null for those that the alphabet lacks."""
        return [self._ids.get(symbol, NULL) for symbol in self.respell(symbols)]

    def respell(self, symbols: Iterable[str]) -> list[str]:
        """The symbols, those that the alphabet lacks in the other case, or with a plain apostrophe
        for a typographic one, if it has them so."""
        known = self._ids
        return [symbol if symbol in known else self._respell_symbol(symbol) for symbol in symbols]

    def unknown(self, symbols: Iterable[str]) -> list[str]:
        """Those of the symbols, in their order, that the alphabet lacks however they are spelt."""
        return [symbol for symbol in self.respell(symbols) if symbol not in self._ids]

    def _respell_symbol(self, symbol: str) -> str:
        plain = "'" if symbol == "\N{RIGHT SINGLE QUOTATION MARK}" else symbol
        spellings = (symbol.lower(), symbol.upper(), plain)
        return next((near for near in spellings if near in self._ids), symbol)

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The symbols of the ids, nulls removed."""
        for position, k in enumerate(ids):
            if not 0 <= k <= len(self):
                raise ValueError(
                    f"id {k}, at position {position}, is not between 0 and {len(self)}"
                )
        return [self.symbols[k - 1] for k in ids if k != NULL]
