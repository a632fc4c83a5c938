"""The load parameters of llama.cpp's server that `weft models tune` varies.

`slots` and `context_tokens` are not among them: a search sends one request at a time.
"""

from runner_svc.policy.tuning import TunedParameter

TUNED_PARAMETERS = (
    TunedParameter(name="threads"),
    TunedParameter(name="flash_attention", values=("on", "off")),
    TunedParameter(name="cache_type_k", values=("f16", "q8_0", "q4_0")),
    TunedParameter(name="cache_type_v", values=("f16", "q8_0", "q4_0")),
    # The server's batches for embeddings are as long as the context.
    TunedParameter(name="batch_tokens", values=(512, 1024, 2048, 4096), unless_embeds=True),
    TunedParameter(name="ubatch_tokens", values=(128, 256, 512, 1024, 2048), unless_embeds=True),
    TunedParameter(name="gpu_layers", values=(-1, 0, 8, 16, 24, 32, 48), needs_accelerator=True),
    TunedParameter(name="spec_draft_n_max", values=(1, 2, 3, 4, 6), needs="spec_type"),
    TunedParameter(name="spec_draft_p_min", values=(0.0, 0.5, 0.75, 0.9), needs="spec_type"),
)
