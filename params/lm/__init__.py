"""Language models over bytes, from one for a laptop to one of a billion weights.

Memory is what each accelerator needs, computed in float32. A weight takes 16 bytes:
itself, its gradient, Adam's two slots. Under 1F1B a stage keeps its inputs of at most K
microbatches. The microbatch being recomputed takes, for each position,
`n (17 w + 2 a) + 4 a` numbers: n blocks a stage, width w, a = num_heads x context.
(Fitted to the peak of one stage of `Small` on a CPU, 2.7 GB without Adam.) Logits of a
microbatch and TensorFlow itself add to it.
"""

from __future__ import annotations

from tfgpipe_params.lm.backbone import Backbone, BackboneLanguageModel
from tfgpipe_params.lm.corpus import Corpus
from tfgpipe_params.lm.sizes import Transformer
from tfgpipe_params.lm.task import LanguageModel
from tfgpipe_trainer.config import Evaluation, Optimizer, Pipelining, Saving, Training


class Tiny(LanguageModel):
    """0.5 million weights on two CPU cores.

    Command:   python -m trainer --params=lm.Tiny --logdir=runs/tiny
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      1 to 2 minutes.
    Result:    1.57 nats a byte; the bigram model has 2.36.
    """

    pipelining: Pipelining = Pipelining(num_stages=2, num_microbatches=8, remat="none")
    optimizer: Optimizer = Optimizer(learning_rate=5e-3)
    model: Transformer = Transformer(num_layers=2, context=64)
    training: Training = Training(num_steps=800, batch_size=32)
    evaluation: Evaluation = Evaluation(every_steps=400)


class Experts(Tiny):
    """1.3 million weights, four experts in each block, of which a byte takes two.

    Attention is over two parts of the sequence, and two devices have two experts each.

    Command:   python -m trainer --params=lm.Experts --logdir=runs/experts
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1.2 GB in all, most of it TensorFlow itself.
    Time:      5 minutes.
    Result:    1.53 nats a byte; the bigram model has 2.36.
    """

    pipelining: Pipelining = Tiny.pipelining.replace(
        num_shards=2, tp_collective="sequence"
    )
    model: Transformer = Tiny.model.replace(num_experts=4)


class Packed(Tiny):
    """0.45 million weights that learn from packed paragraphs, one softmax table.

    Command:   python -m trainer --params=lm.Packed --logdir=runs/packed
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1 GB in all, most of it TensorFlow itself.
    Time:      3.2 minutes.
    Result:    1.74 nats a byte; the bigram model has 2.36. Paragraphs begin with
               nothing before them, so more of their bytes are hard than of Tiny's.
               Of the windows 99% is text, 0.04% padding, the rest starts.
    """

    data: Corpus = Corpus(documents="packed")
    pipelining: Pipelining = Tiny.pipelining.replace(num_microbatches=4)
    model: Transformer = Tiny.model.replace(context=128, softmax="tied")
    training: Training = Tiny.training.replace(batch_size=16)


class Small(LanguageModel):
    """86 million weights on four accelerators.

    Command:   python -m trainer --params=lm.Small --logdir=runs/small
               --set='data.files=TEXTS/**/*.txt'
    Hardware:  4 accelerators.
    Memory:    3.4 GB each: weights 0.3, stage inputs 0.1, recomputation 2.7.
    Time:      not measured.
    Data:      20,000 steps read 1.3 billion bytes; the default corpus has 10 million.
    """

    num_accelerators = 4
    pipelining: Pipelining = Pipelining(num_stages=4, num_microbatches=16)
    optimizer: Optimizer = Optimizer(learning_rate=6e-4, warmup=0.02, weight_decay=0.1)
    model: Transformer = Transformer(
        num_layers=12, width=768, num_heads=12, mlp_width=3072, context=1024
    )
    training: Training = Training(num_steps=20_000, batch_size=64)
    checkpoint: Saving = Saving(every_steps=500, every_minutes=30, keep_hours=12)


class Medium(Small):
    """304 million weights on eight accelerators.

    Command:   python -m trainer --params=lm.Medium --logdir=runs/medium
               --set='data.files=TEXTS/**/*.txt'
    Hardware:  8 accelerators, or 4 with --set=pipelining.num_stages=4.
    Memory:    2.8 GB each: weights 0.6, stage inputs 0.1, recomputing 1.8. On 4, 5 GB.
    Time:      not measured.
    """

    num_accelerators = 8
    pipelining: Pipelining = Small.pipelining.replace(num_stages=8, num_microbatches=32)
    optimizer: Optimizer = Small.optimizer.replace(learning_rate=3e-4)
    model: Transformer = Small.model.replace(
        num_layers=24, width=1024, num_heads=16, mlp_width=4096
    )


class OneBillion(Medium):
    """1.07 billion weights on eight accelerators; they alone would fill one of 16 GB.

    Command:   python -m trainer --params=lm.OneBillion --logdir=runs/one-billion
               --set='data.files=TEXTS/**/*.txt'
    Hardware:  8 accelerators.
    Memory:    4.6 GB each: weights 2.1, stage inputs 0.1, recomputation 2.1.
    Time:      not measured.
    """

    num_accelerators = 8
    optimizer: Optimizer = Small.optimizer.replace(learning_rate=2e-4)
    model: Transformer = Medium.model.replace(width=1920, num_heads=15, mlp_width=7680)


class Llama(BackboneLanguageModel):
    """0.4 million weights as of Llama, from keras-hub: rotary, grouped queries, gated.

    Command:   python -m trainer --params=lm.Llama --logdir=runs/llama
    Hardware:  2 CPU cores, no accelerator.
    Memory:    1.2 GB in all, most of it TensorFlow itself.
    Time:      1.5 minutes.
    Result:    1.52 nats a byte, where the bigram model has 2.36. Needs keras-hub.
    """

    pipelining: Pipelining = Tiny.pipelining
    optimizer: Optimizer = Tiny.optimizer
    training: Training = Tiny.training
    checkpoint: Saving = Tiny.checkpoint
    model: Backbone = Backbone(
        arguments=(
            *("num_layers=2", "hidden_dim=128", "intermediate_dim=344"),
            *("num_query_heads=4", "num_key_value_heads=2"),
        )
    )
