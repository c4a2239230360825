"""Which rows of every batch are read on a host, where several train together."""

from __future__ import annotations

import dataclasses

from trainer.hyperparams import HyperparameterError


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of one of several hosts, by default all rows of the only one.

    Attributes:
        host: Its number, from 0.
        num_hosts: How many there are; each reads the same number of rows.
    """

    host: int = 0
    num_hosts: int = 1

    def rows(self, batch_size: int) -> slice:
        """Returns which rows of a batch are read here.

        Raises:
            HyperparameterError: If the hosts cannot share a batch evenly.
        """
        if batch_size % self.num_hosts:
            raise HyperparameterError(
                f"training.batch_size: expected a multiple of {self.num_hosts}, the "
                f"number of hosts that read it; received {batch_size}."
            )
        size = batch_size // self.num_hosts
        return slice(self.host * size, (self.host + 1) * size)


WHOLE = Share()
