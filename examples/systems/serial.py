"""One process, no parallelism: what every other script here must equal.

python serial.py                 the GPT of tiny.py
python serial.py unused          the same, each step without another block
python serial.py transformers    GPT-2 of transformers, as trainer.py trains it
"""

import sys

import torch
from tiny import STEPS, batch, build, loss_of, report


def main(model_of: str = "tiny") -> None:
    if model_of == "transformers":
        from trainer import build as build_gpt2

        model = build_gpt2()
    else:
        model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        if model_of == "transformers":
            loss = model(input_ids=x, targets=y)["loss"]
        else:
            loss = loss_of(model(x, without=1 + step % 4 if model_of == "unused" else -1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report(losses, dict(model.named_parameters()))


if __name__ == "__main__":
    main(*sys.argv[1:])
