"""The folder of reports/ for a GPU, by the name that its driver gives it. As a program: for this machine's first."""

import re

# Whose it is, how much memory it has and how it is plugged in: results of an H100 are in reports/h100,
# whichever it is.
LEFT_OUT = re.compile(
    r"nvidia|geforce|tesla|quadro|graphics|gpu|generation|\d+gb|hbm\d+e?|pcie|sxm\d*|nvl|device",
    re.IGNORECASE,
)


def folder_of(name: str) -> str:
    """The words that tell one model from another, joined: "NVIDIA GeForce RTX 5090" becomes rtx5090. A part of a GPU
    (MIG) keeps the part's name, for its times are not the whole's."""
    words = [word for word in re.split(r"[\s/_-]+", name) if not LEFT_OUT.fullmatch(word)]
    found = re.sub(r"[^a-z0-9]", "", "".join(words).lower())
    if not found:
        raise ValueError(f"no folder by the name of a GPU called '{name}': name one with --machine")
    return found


if __name__ == "__main__":
    import torch

    print(folder_of(torch.cuda.get_device_name()))
