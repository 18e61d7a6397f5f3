"""The folder of reports/ for a GPU, by the name that its driver gives it. As a program: for this machine's first."""

import re

# Words for vendor, memory and form: results of any H100 are in reports/h100.
WORDS = r"nvidia|geforce|tesla|quadro|graphics|gpu|generation|\d+gb|hbm\d+e?|pcie|sxm\d*|nvl|device"
LEFT_OUT = re.compile(WORDS, re.IGNORECASE)


def folder_of(name: str) -> str:
    """ "NVIDIA GeForce RTX 5090" becomes rtx5090. A part of a GPU (MIG) keeps the part's name, as its times differ."""
    words = [word for word in re.split(r"[\s/_-]+", name) if not LEFT_OUT.fullmatch(word)]
    found = re.sub(r"[^a-z0-9]", "", "".join(words).lower())
    if not found:
        raise ValueError(f"no folder by the name of a GPU called '{name}': name one with --machine")
    return found


if __name__ == "__main__":
    import torch

    print(folder_of(torch.cuda.get_device_name()))
