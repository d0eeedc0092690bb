"""Random tokens to train on."""

import torch


class Rows:
    """Random tokens, the same on every rank."""

    def __init__(self, args, count: int = 64):
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(0, args.vocab_size, (count, args.seq_length + 1), generator=generator)
        self._positions = torch.arange(args.seq_length)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict:
        row = self._tokens[index]
        return {
            "tokens": row[:-1],
            "labels": row[1:],
            "loss_mask": torch.ones(len(row) - 1),
            "position_ids": self._positions,
        }
