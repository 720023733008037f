"""Pictures of shapes and what is said of them, drawn by number; models and losses of several tasks on them.

`clip.toml` (towers side by side), `translate.toml` (an encoder and a decoder) and `llava.toml` (a language model that
sees) train them: `fxpar train examples/clip.toml`.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fxpar import losses

WORDS: list[str] = [
    *("begin", "a", "at", "image"),
    *("small", "big", "red", "green", "blue", "circle", "square", "bar", "top", "bottom", "left", "right"),
]
SIZES, COLOURS, SHAPES, ROWS, COLUMNS = WORDS[4:6], WORDS[6:9], WORDS[9:12], WORDS[12:14], WORDS[14:]
PIXELS, PATCH, POINTS, PATCHES = 16, 4, 8, 16


def ids(text: str) -> torch.Tensor:
    return torch.tensor([WORDS.index(word) for word in text.split()])


def scene(number: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Picture [3, 16, 16], the outline of what it shows [8, 2], and a caption of eight words."""
    generator = np.random.default_rng(number)
    size, colour, shape, row, column = (int(generator.integers(n)) for n in (2, 3, 3, 2, 2))
    y, x, r = 4 + 7 * row, 4 + 7 * column, 2 + size
    v, u = np.mgrid[:PIXELS, :PIXELS] - np.array([y, x])[:, None, None]
    inside = [u**2 + v**2 <= r**2, np.maximum(abs(u), abs(v)) < r, (abs(v) < 2) & (abs(u) <= r + 1)][shape]
    picture = 0.1 * generator.standard_normal((3, PIXELS, PIXELS))
    picture[colour] += inside
    edge = np.argwhere(inside & ~(np.roll(inside, 1, 0) & np.roll(inside, -1, 0) & np.roll(inside, 1, 1)))
    outline = (edge[np.linspace(0, len(edge) - 1, POINTS).astype(int)] - PIXELS / 2) / PIXELS
    caption = f"a {SIZES[size]} {COLOURS[colour]} {SHAPES[shape]} at {ROWS[row]} {COLUMNS[column]}"
    return picture.astype(np.float32), outline.astype(np.float32), f"begin {caption}"


def batch(number: int, rows: int = 8) -> dict[str, torch.Tensor]:
    """The scenes of a batch: `pixels` [B, 3, 16, 16], `points` [B, 8, 2] and `ids` [B, 8]."""
    pictures, outlines, captions = zip(*(scene(rows * number + i) for i in range(rows)), strict=True)
    return {
        "pixels": torch.from_numpy(np.stack(pictures)),
        "points": torch.from_numpy(np.stack(outlines)),
        "ids": torch.stack([ids(one) for one in captions]),
    }


def only(number: int, *keys: str) -> dict[str, torch.Tensor]:
    found = batch(number)
    return {key: found[key] for key in keys}


# ---------------------------------------------------------------------------------------------- towers, side by side
class Layer(nn.Module):
    """Attention (over `seen` too, if that is given) and a feed-forward network."""

    def __init__(self, dim: int, causal: bool = False, cross: bool = False):
        super().__init__()
        self.causal, self.norm = causal, nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        if cross:
            self.query, self.seen, self.told = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, seen=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(self.attend(q, k, v, self.causal))
        if seen is not None:
            k, v = self.seen(seen).chunk(2, -1)
            x = x + self.told(self.attend(self.query(x), k, v, False))
        return x + self.mlp(x)

    def attend(self, q, k, v, causal):
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class Tower(nn.Module):
    """`first` makes [B, T, D] of what there is to see, and layers a feature [B, D] of that."""

    def __init__(self, first: nn.Module, dim: int, layers: int):
        super().__init__()
        self.first, self.layers = first, nn.ModuleList(Layer(dim) for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(x.mean(1), dim=-1)


class Patches(nn.Module):
    """[B, 3, 16, 16] -> [B, 16, D]"""

    def __init__(self, dim: int):
        super().__init__()
        self.cut, self.place = nn.Conv2d(3, dim, PATCH, stride=PATCH), nn.Parameter(0.1 * torch.randn(PATCHES, dim))

    def forward(self, pixels):
        return self.cut(pixels).flatten(2).transpose(1, 2) + self.place


class Words(nn.Module):
    """[B, T] -> [B, T, D]"""

    def __init__(self, dim: int):
        super().__init__()
        self.word, self.place = nn.Embedding(len(WORDS), dim), nn.Parameter(0.1 * torch.randn(16, dim))

    def forward(self, ids):
        return self.word(ids) + self.place[: ids.shape[1]]


def towers(dim: int = 32, layers: int = 2) -> nn.Module:
    """Towers of pictures, outlines and captions; that of pictures is the largest."""
    return nn.ModuleDict(
        {
            "pixels": Tower(Patches(dim), dim, 2 * layers),
            "points": Tower(nn.Linear(2, dim), dim, layers),
            "ids": Tower(Words(dim), dim, layers),
        }
    )


def contrast(model, batch):
    """Of what two towers see every row of the one against every row of the other: a sum over rows."""
    one, other = (model[key](value) for key, value in batch.items())
    scores, right = 10 * one @ other.T, torch.arange(one.shape[0])
    return (F.cross_entropy(scores, right, reduction="sum") + F.cross_entropy(scores.T, right, reduction="sum")) / 2


def picture_and_caption(number: int):
    return only(number, "pixels", "ids")


def outline_and_caption(number: int):
    return only(number, "points", "ids")


def picture_and_outline(number: int):
    return only(number, "pixels", "points")


# ------------------------------------------------------------------------------------------- an encoder and a decoder
class Translator(nn.Module):
    """Reads [B, S] words, and writes [B, T] others."""

    def __init__(self, dim: int, layers: int):
        super().__init__()
        self.words, self.encoder = Words(dim), nn.ModuleList(Layer(dim) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(dim, causal=True, cross=True) for _ in range(layers))
        self.head = nn.Linear(dim, len(WORDS))

    def forward(self, source, target):
        seen, x = self.words(source), self.words(target)
        for layer in self.encoder:
            seen = layer(seen)
        for layer in self.decoder:
            x = layer(x, seen)
        return self.head(x)


def translator(dim: int = 32, layers: int = 2) -> nn.Module:
    return Translator(dim, layers)


def written(model, batch):
    return losses.cross_entropy_sum(model(batch["source"], batch["target"]), batch["labels"])


def _rewritten(number: int, rewrite):
    """Captions as they are, to be written as `rewrite` has them: a list of words of each."""
    captions = batch(number)["ids"]
    target = torch.stack([torch.cat([ids("begin"), rewrite(one)]) for one in captions])
    return {"source": captions, "target": target, "labels": losses.next_token_labels(target)}


def backwards(number: int):
    """The caption, its words in reverse."""
    return _rewritten(number, lambda words: words.flip(0))


def what_and_where(number: int):
    """The shape, its colour, and its place."""
    return _rewritten(number, lambda words: words[[4, 3, 6, 7]])


# ------------------------------------------------------------------------------------------ a language model that sees
def llava(dim: int = 32, layers: int = 2) -> nn.Module:
    """Llava of transformers, small and with random weights."""
    import transformers

    size = {"hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 2 * dim}
    vision = transformers.CLIPVisionConfig(**size, image_size=PIXELS, patch_size=PATCH)
    text = transformers.LlamaConfig(**size, num_key_value_heads=4, vocab_size=len(WORDS))
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=WORDS.index("image"))
    return transformers.LlavaForConditionalGeneration(config)


def seen_and_said(model, batch):
    """The words `image` at the beginning stand for the patches of the picture."""
    inner = model.model
    patches = inner.multi_modal_projector(inner.vision_tower(batch["pixels"]).last_hidden_state[:, 1:])
    words = inner.get_input_embeddings()(batch["input_ids"])
    placed = F.pad(patches, (0, 0, 0, words.shape[1] - patches.shape[1]))
    x = torch.where((batch["input_ids"] == WORDS.index("image"))[..., None], placed, words)
    return losses.cross_entropy_sum(model.lm_head(inner.language_model(inputs_embeds=x)[0]), batch["labels"])


def said(model, batch):
    """Text alone: no image is looked at."""
    x = model.model.get_input_embeddings()(batch["input_ids"])
    return losses.cross_entropy_sum(model.lm_head(model.model.language_model(inputs_embeds=x)[0]), batch["labels"])


def picture_and_words(number: int):
    """One picture, and its caption behind it."""
    picture, _, caption = scene(number)
    words = torch.cat([ids("image").expand(PATCHES), ids(caption)])[None]
    labels = losses.next_token_labels(words).masked_fill(words == WORDS.index("image"), -100)
    return {"pixels": torch.from_numpy(picture)[None], "input_ids": words, "labels": labels}


def words(number: int) -> torch.Tensor:
    """One to four captions, as one sequence."""
    return torch.cat([ids(scene(7 * number + i)[2]) for i in range(1 + number % 4)])
