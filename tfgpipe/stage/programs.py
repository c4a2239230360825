"""The forward and backward programs of a stage, as pieces of its one trace."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tfgpipe.graph import partitioner
from tfgpipe.stage import finishing
from tfgpipe.stage.accumulation import Sums
from tfgpipe.stage.joint import Trace
from tfgpipe.stage.program import (
    Builder,
    FunctionCache,
    Options,
    Program,
    Values,
    changed,
    present,
)
from tfgpipe.stage.subgraph import Excerpt, GraphSource


class Programs:
    """The programs of a traced stage, each built when it is first asked for.

    Args:
        trace: The stage.
        options: How to build them.
        library: Functions to share. New ones are added.

    Attributes:
        sums: How the gradients of the weights are summed over microbatches.
        lasting: Names of tensors that are the same for all microbatches of a step.
        residuals: Names of the tensors that the forward keeps for the backward.
    """

    def __init__(self, trace: Trace, options: Options, library: FunctionCache) -> None:
        self._source = GraphSource(trace)
        pairs = zip(trace.state, trace.new_state, strict=True)
        self._unchanged = (
            *trace.weights,
            *(before for before, after in pairs if before == after),
        )
        if options.num_microbatches != 1:
            trace = finishing.unfinished(trace, self._source, self._unchanged)
        self._trace = trace
        self.sums = Sums(
            trace,
            num_microbatches=options.num_microbatches,
            puts_off=options.on_cpu,
            in_place=options.core is None,
        )
        self._builder = Builder(
            trace, self.sums, options, library, self._source.fingerprint
        )
        self._once: dict[tuple[str, ...], Program] = {}
        self._given = present(*trace.output_grads, trace.loss_grad)
        self._outputs = [*trace.outputs, *changed(trace), *present(trace.loss)]
        self._input_grads = present(*trace.input_grads)
        self._weight_grads = list(self.sums.names)
        self.lasting = partitioner.lasting(
            self._source.graph,
            sources=self._unchanged,
            fetches=[*self._outputs, *self._input_grads, *self._weight_grads],
            constants=self._source.constants,
            stateful=self._source.stateful,
            worthwhile=self._source.worthwhile,
        )
        self._sources = (
            *self.lasting,
            *trace.inputs,
            *trace.weights,
            *trace.carried,
            *trace.replicas,
        )
        self._known = (*self._sources, *self._given, *trace.captures)
        ends = {
            "sources": self._known,
            "outputs": self._outputs,
            "gradients": [*self._input_grads, *self._weight_grads],
        }
        graph, source = self._source.graph, self._source
        if options.saves:
            self.residuals = partitioner.saving(
                graph, constants=source.constants, done=trace.effects, **ends
            )
        else:
            self.residuals = partitioner.recomputing(
                graph, stateful=source.stateful, **ends
            )

    @functools.cached_property
    def forward(self) -> Program:
        """The forward program."""
        excerpt = self._source.excerpt(
            fetches=(*self._outputs, *self.residuals),
            feeds=self._sources,
            effects=self._trace.effects,
        )
        return self._builder.forward(excerpt)

    @functools.cached_property
    def backward(self) -> Program:
        """The backward program."""
        excerpt = self._backward_excerpt([*self._input_grads, *self._weight_grads])
        return self._builder.backward("backward", excerpt, self._input_grads)

    @functools.cached_property
    def backward_input(self) -> Program:
        """The half of the backward that makes the gradients of the inputs.

        It recomputes what both halves need, and hands the other what is between them.
        """
        kept = [name for name in self._between if name not in self.residuals]
        made = list(dict.fromkeys([*self._input_grads, *kept]))
        excerpt = self._backward_excerpt(made)
        return self._builder.backward("backward_input", excerpt, made, sums=False)

    @functools.cached_property
    def backward_weight(self) -> Program:
        """The half of the backward that makes the gradients of the weights."""
        excerpt = self._backward_excerpt(self._weight_grads, self._between)
        return self._builder.backward("backward_weight", excerpt, [])

    def made_once(
        self, run: Program, values: Values, devices: Sequence[str] = ()
    ) -> Values:
        """Returns what a program takes of `lasting`, but for what is there already.

        Args:
            run: One of the programs.
            values: What there is, the weights and the state among it.
            devices: Those of the shards; nothing for all here.
        """
        names = tuple(n for n in self.lasting if n in run.feeds and n not in values)
        if not names:
            return {}
        if names not in self._once:
            excerpt = self._source.excerpt(fetches=names, feeds=self._unchanged)
            which = tuple(map(self.lasting.index, names))
            self._once[names] = self._builder.once(excerpt, which)
        return self._once[names](values, devices=devices)[0]

    @functools.cached_property
    def end(self) -> Program:
        """The program from the sums over all microbatches to the gradients."""
        same = (*self.lasting, *self._unchanged)
        finish = finishing.finish(self._trace, self._source, same)
        return self._builder.end(finish)

    def _backward_excerpt(
        self, fetches: Sequence[str], between: Sequence[str] = ()
    ) -> Excerpt:
        return self._source.excerpt(
            fetches=fetches,
            feeds=tuple(
                dict.fromkeys((*between, *self._given, *self.residuals, *self._sources))
            ),
            done=self._trace.effects,
        )

    @functools.cached_property
    def _between(self) -> tuple[str, ...]:
        """Names of what one half of the backward hands to the other."""
        return partitioner.halves(
            self._source.graph,
            sources=self._known,
            outputs=self._outputs,
            input_grads=self._input_grads,
            weight_grads=self._weight_grads,
            constants=self._source.constants,
            done=self._trace.effects,
        )
