"""Rematerialisation of all but what is named: by layer, or by the name of a tensor."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Sequence

from tfgpipe.remat.forward_graph import DeviceStages, ForwardGraph
from tfgpipe.remat.policy import Remat


@dataclasses.dataclass(frozen=True)
class NamesRemat(Remat):
    """Saves the results of operations of some names, and recomputes what lies between.

    The name of an operation begins with those of the layers that it is in, such as
    `block_3/attention/softmax/Softmax`, without the numbers that TensorFlow appends. So
    `"block_3/*"` saves all of a layer, and `"*/attention_output"` the results of
    `tf.identity(x, name="attention_output")` in any: JAX's
    `checkpoint_policies.save_only_these_names`. Equal stages are traced one by one.

    >>> from tfgpipe.remat import NamesRemat
    >>> NamesRemat(names=("*/mlp/*", "*/attention_output"))
    NamesRemat(names=('*/mlp/*', '*/attention_output'))

    Attributes:
        names: Patterns of names, with `*` and `?` as in `fnmatch`.
    """

    name = "names"
    reads_names = True

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not all(self.names):
            raise ValueError(
                "`names` must be patterns of names of operations. Received "
                f'{self.names!r}. Pass several, such as ("*/attention/*",).'
            )
        object.__setattr__(self, "names", tuple(self.names))

    @property
    def saves_results(self) -> bool:
        """True."""
        return True

    def saved(self, graph: ForwardGraph) -> list[str]:
        """Returns the results of operations of these names."""
        return graph.results_where(
            lambda name, _: any(
                fnmatch.fnmatchcase(_short(name), x) for x in self.names
            )
        )

    def for_stages(
        self, num_stages: int, devices: Callable[[], Sequence[DeviceStages]]
    ) -> tuple[Remat, ...]:
        """Returns the policy of each stage: this one.

        Args:
            num_stages: The number of stages.
            devices: Returns what the stages of each device hold.

        Raises:
            ValueError: If no operation of any stage has a name of some pattern.
        """
        graphs = [graph for each in devices() for graph in each.graphs.values()]
        known = [_short(name) for graph in graphs for name in graph.types]
        for pattern in self.names:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
                layers = dict.fromkeys(name.partition("/")[0] for name in known)
                raise ValueError(
                    "`names` must match operations that a backward would run again. "
                    f"Received {pattern!r}, which matches none of {len(known)}; their "
                    f"names begin with {', '.join(layers)}. One is {known[-1]!r}."
                )
        return (self,) * num_stages


def _short(name: str) -> str:
    """Returns a name without the numbers that TensorFlow appends to its parts.

    Keras opens the scope of a layer twice, so each part has one.
    """
    return re.sub(r"_\d+(?=/|$)", "", name)
