"""RoBERTa-base: 124,697,433 parameters with the head for masked tokens.

    python -m jaxpretrain.main --config=configs/roberta_base.py --workdir=runs/roberta_base

Hardware: published on 1,024 V100s. Source and data: configs/_roberta.py.
"""

from _roberta import recipe


def get_config():
    return recipe("base")
