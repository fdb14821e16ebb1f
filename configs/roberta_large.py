"""RoBERTa-large: 355,412,057 parameters with the head for masked tokens.

    python -m jaxpretrain.main --config=configs/roberta_large.py --workdir=runs/roberta_large

Hardware: published on 1,024 V100s, about a day for 100,000 of the 500,000 steps. Source and data: configs/_roberta.py.
"""

from _roberta import recipe


def get_config():
    return recipe("large")
