"""LoRA fine-tuning of keras-hub's GPT-2 in four stages.

    python examples/gpt2_lora.py

It needs no GPU but keras-hub (`pip install keras-hub`), takes 20 seconds, and
ends with:

    gpt2_causal_lm: 4 stages, 4 microbatches, remat=stage
    stage  device  layers                                                   parameters   weights     slots  share
    0      CPU:0   token_embedding .. transformer_layer_1 (6)                   21,376  83.5 KiB  18.0 KiB  27.0%
    1      CPU:1   transformer_layer_2, transformer_layer_3                     19,264  75.2 KiB  18.0 KiB  24.3%
    2      CPU:2   transformer_layer_4, transformer_layer_5                     19,264  75.2 KiB  18.0 KiB  24.3%
    3      CPU:3   transformer_layer_6 .. token_embedding (of stage 0) (4)      19,328  75.5 KiB  18.0 KiB  24.4%
    9,216 of 79,232 parameters are trained
    the other 116 weights are as they were
    the loss fell from 9.2 to 4.1

The weights are random and the model is small, so that nothing is downloaded. For the
real one replace the backbone by `keras_hub.models.Backbone.from_preset("gpt2_base_en")`,
and leave its embeddings as they are. `counting.lora.h5` has what was trained.
"""

import keras
import keras_hub
import numpy as np

import tfgpipe

tfgpipe.make_logical_cpus(4)
keras.utils.set_random_seed(0)

LENGTH, VOCABULARY, WIDTH = 16, 50, 32
backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=VOCABULARY,
    num_layers=8,
    num_heads=4,
    hidden_dim=WIDTH,
    intermediate_dim=64,
    dropout=0.0,
    max_sequence_length=LENGTH,
)
# Random weights as large as trained ones, so that there is something to tune.
backbone.token_embedding.embeddings.assign(
    keras.random.normal((VOCABULARY, WIDTH), stddev=0.3)
)
backbone.enable_lora(rank=4)
model = keras_hub.models.GPT2CausalLM(backbone=backbone)  # Of token ids, not text.

pipelined = tfgpipe.pipeline(model, num_stages=4, num_microbatches=4, schedule="1f1b")
pipelined.compile(
    keras.optimizers.AdamW(5e-2),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)

# Sentences that count: the next token is the one before plus the step.
random = np.random.default_rng(0)
step, first = random.integers(1, 4, (64, 1)), random.integers(0, VOCABULARY, (64, 1))
tokens = (first + step * np.arange(LENGTH + 1)) % VOCABULARY
x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((64, LENGTH), "bool")}

frozen = [weight.numpy() for weight in pipelined.non_trainable_weights]
history = pipelined.fit(x, tokens[:, 1:], batch_size=32, epochs=10, verbose=0)
losses = history.history["loss"]

print(tfgpipe.stage_table(pipelined))
trained = sum(np.prod(weight.shape) for weight in pipelined.trainable_weights)
print(f"{trained:,} of {pipelined.count_params():,} parameters are trained")
for old, weight in zip(frozen, pipelined.non_trainable_weights, strict=True):
    np.testing.assert_array_equal(old, weight.numpy())
print(f"the other {len(frozen)} weights are as they were")
print(f"the loss fell from {losses[0]:.1f} to {losses[-1]:.1f}")

# The pipeline shares its weights with the model, which can save the small ones alone.
backbone.save_lora_weights("counting.lora.h5")
