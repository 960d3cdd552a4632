"""The ZGCM-1 decoder: gated sliding-window attention with a global layer every sixth, linear in length."""

from zgcm_model import parallel as parallel
from zgcm_model import precision as precision
from zgcm_model._version import __version__
from zgcm_model.attention import attention
from zgcm_model.cache import DecoderCache
from zgcm_model.config import ModelConfig, padded_vocab_size
from zgcm_model.decoder import Decoder
from zgcm_model.flops import FlopsBreakdown, flops_per_token
from zgcm_model.generate import Sampling, generate, left_pad
from zgcm_model.initialization import initialize
from zgcm_model.interchange.huggingface import load_pretrained, load_weights, save_pretrained
from zgcm_model.loss import causal_lm_terms, chunked_lm_terms, global_token_mean
from zgcm_model.outliers import collect_block_outputs, tweo_terms

__all__ = [
    "Decoder",
    "DecoderCache",
    "FlopsBreakdown",
    "ModelConfig",
    "Sampling",
    "__version__",
    "attention",
    "causal_lm_terms",
    "chunked_lm_terms",
    "collect_block_outputs",
    "flops_per_token",
    "generate",
    "global_token_mean",
    "initialize",
    "left_pad",
    "load_pretrained",
    "load_weights",
    "padded_vocab_size",
    "save_pretrained",
    "tweo_terms",
]
