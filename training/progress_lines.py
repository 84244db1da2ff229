"""The lines that a run prints while it trains."""

from run_directory.console import Console, duration


class ProgressLines:
    """Prints one line for each measured speed, and for each validation, of metrics.jsonl.

    Args:
        steps, tokens: of the whole run.
    """

    def __init__(self, steps: int, tokens: int, console: Console):
        self._steps = steps
        self._tokens = tokens
        self._console = console
        self._nll: dict[str, float] = {}  # of the last validation, by length

    def write(self, line: dict) -> None:
        """Print one line of metrics.jsonl, if it is of these kinds."""
        if line["kind"] == "train" and "tokens_per_second" in line:
            rate = line["tokens_per_second"]
            mfu = f"  MFU {line['mfu']:.0%}" if "mfu" in line else ""
            left = duration((self._tokens - line["tokens"]) / rate)
            self._console.info(
                f"step {line['step']:>{len(str(self._steps))}}/{self._steps}  loss "
                f"{float(line['loss']):7.4f}  lr {line['lr']:.2e}  {rate:>8,.0f} tokens/s{mfu}  "
                f"{left} left"
            )
        elif line["kind"] == "validation":
            if not self._nll:
                self._console.info(
                    f"held-out NLL by length: the same {line['targets']:,} targets of "
                    f"{line['documents']} documents"
                )
            nll = {length: float(value) for length, value in line["nll"].items()}
            values = [
                f"{length}: {value:.4f}"
                + (f" ({value - self._nll[length]:+.4f})" if length in self._nll else "")
                for length, value in nll.items()
            ]
            self._console.info(f"step {line['step']} held-out NLL  {'  '.join(values)}")
            self._nll = nll
