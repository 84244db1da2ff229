"""Functions recorded as CUDA graphs."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries keep a workspace for each stream that they have been used
    on, and torch.cuda.graph's own stream is one of the device that recorded first."""
    return torch.cuda.Stream(device)


class CudaGraph:
    """A function of one tensor recorded as a CUDA graph. It runs twice before the recording, which
    compiles it and initializes libraries."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor):
        self._input = x.clone()
        stream = recording_stream(x.device)
        with torch.cuda.device(x.device):
            self._graph = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    function(self._input)
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads, such as loaders that pin memory, may use CUDA meanwhile.
            with torch.cuda.graph(
                self._graph,
                stream=stream,
                capture_error_mode="thread_local",
            ):
                self._output = function(self._input)

    def __call__(self, x: Tensor) -> Tensor:
        """The output for x, which the next call overwrites."""
        self._input.copy_(x)
        self._graph.replay()
        return self._output
