"""A weighted mixture of sources without state: which source row i of the run comes from, and its which-th row that is.

Source 0 takes row i where floor(i p) steps up, p its share; the rows it leaves are dealt among the others in the same
way. So the count of each source before any row is known in closed form, and after i rows it is within a few rows of
its share of i.
"""

import fractions

import numpy as np

_MAX_DENOMINATOR = 1_000_000  # of a share: i * numerator stays below 2^63 for 9e12 rows


class Mixture:
    """Deals rows among sources by `weights`, in the order of `names`. Raises ValueError for a vanishing weight."""

    def __init__(self, names: list[str], weights: list[float]):
        self.num_sources = len(weights)
        exact = [fractions.Fraction(str(weight)) for weight in weights]
        total = sum(exact)
        self._shares = []
        for k, weight in enumerate(exact[:-1]):
            share = (weight / sum(exact[k:])).limit_denominator(_MAX_DENOMINATOR)
            self._shares.append((share.numerator, share.denominator))
        for name, weight in zip(names, exact, strict=True):
            if weight * _MAX_DENOMINATOR < total:
                raise ValueError(
                    f"data.mixture.{name}.weight={float(weight)}: below a millionth of all weights; remove the source"
                )

    def assign(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, which of that source's rows) of the rows `index` of the run; all int64 [N]."""
        source = np.full(index.shape, self.num_sources - 1)
        local = np.zeros_like(index)
        rest, undecided = index, np.ones(index.shape, bool)
        for k, (numerator, denominator) in enumerate(self._shares):
            before = rest * numerator // denominator
            mine = undecided & ((rest + 1) * numerator // denominator > before)
            source[mine], local[mine] = k, before[mine]
            undecided &= ~mine
            rest = rest - before
        local[undecided] = rest[undecided]
        return source, local
