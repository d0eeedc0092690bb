"""A pretrain_gpt.py of a few lines, for trees of megatron-core from the package index, which have none.

What trains is the tree's own ``megatron.training.pretrain`` on made-up data.
"""

from functools import partial

import torch
from megatron.core.datasets import utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    engine = args.transformer_impl == "transformer_engine"
    spec = get_gpt_layer_with_transformer_engine_spec if engine else get_gpt_layer_local_spec
    return GPTModel(
        config or core_transformer_config_from_args(args),
        spec(qk_layernorm=args.qk_layernorm),
        *(args.padded_vocab_size, args.max_position_embeddings, pre_process, post_process),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def loss_func(mask, output):
    loss, tokens = torch.sum(output.view(-1).float() * mask.view(-1)), mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def datasets(samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="98,1,1",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


if __name__ == "__main__":
    datasets.is_distributed = True
    utils.compile_helpers = lambda: None  # the package has them compiled, and nothing to compile them with
    defaults = {"tokenizer_type": "NullTokenizer"}
    pretrain(datasets, model_provider, ModelType.encoder_or_decoder, forward_step, args_defaults=defaults)
