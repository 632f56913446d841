"""A Swin-UNet in plain PyTorch, which knows nothing of devices.

Images are cut into patches, and Swin stages (attention within windows, which every second block
shifts) make fewer and wider tokens of them. A decoder undoes it, stage by stage, with the encoder's
tokens of the same size beside its own, up to the pixels, each of which gets a score for each class.
Between modules tokens lie as a map, ``[batch, height, width, features]``.

Sources: Liu et al., "Swin Transformer" (arXiv 2103.14030); Cao et al., "Swin-Unet"
(arXiv 2105.05537).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SwinUNetConfig:
    """Sizes of a :class:`SwinUNet`.

    Attributes:
        image: height and width of an image, in pixels.
        channels: of an image.
        classes: of a pixel.
        patch: side of a patch, in pixels.
        dim: features of a token in the first stage; they double from stage to stage.
        depths: blocks in each stage, of the encoder and of the decoder.
        heads: of attention, in each stage.
        window: side of a window, in tokens.

    Raises:
        ValueError: for an image that windows do not cover in every stage, or heads that do not
            divide the features.
    """

    image: tuple[int, int] = (96, 96)
    channels: int = 1
    classes: int = 3
    patch: int = 4
    dim: int = 48
    depths: tuple[int, ...] = (2, 2, 2)
    heads: tuple[int, ...] = (4, 8, 16)
    window: int = 6

    def __post_init__(self) -> None:
        if len(self.heads) != len(self.depths):
            raise ValueError(f"heads {self.heads} and depths {self.depths}: give both per stage")
        unit = self.patch * self.window * 2 ** (len(self.depths) - 1)
        if any(side % unit for side in self.image):
            raise ValueError(
                f"the sides of an image of {self.image} pixels have to be multiples of {unit}: "
                f"patches of {self.patch}, windows of {self.window}, {len(self.depths)} stages"
            )
        for stage, heads in enumerate(self.heads):
            if self.features(stage) % heads:
                raise ValueError(
                    f"stage {stage}: {heads} heads do not divide {self.features(stage)} features"
                )

    def features(self, stage: int) -> int:
        return self.dim * 2**stage

    def size(self, stage: int) -> tuple[int, int]:
        """Height and width of a stage's map, in tokens."""
        height, width = (side // self.patch // 2**stage for side in self.image)
        return height, width


def to_windows(x: Tensor, window: int) -> Tensor:
    """``[B, H, W, C]`` to ``[B * windows, window * window, C]``."""
    batch, height, width, features = x.shape
    x = x.view(batch, height // window, window, width // window, window, features)
    return x.transpose(2, 3).reshape(-1, window * window, features)


def from_windows(x: Tensor, window: int, height: int, width: int) -> Tensor:
    """``[B * windows, window * window, C]`` to ``[B, H, W, C]``."""
    x = x.view(-1, height // window, width // window, window, window, x.shape[-1])
    return x.transpose(2, 3).reshape(-1, height, width, x.shape[-1])


def shift_mask(height: int, width: int, window: int, shift: int) -> Tensor:
    """Which tokens of a shifted window were neighbours before, ``[windows, n, n]``.

    A shift rolls the map, so that windows at its far edges hold tokens from both sides of it.
    Those attend only to their own side: 0 where they may, minus infinity elsewhere.
    """
    sides = []
    for extent in (height, width):
        place = torch.arange(extent)
        sides.append((place >= extent - window).long() + (place >= extent - shift).long())
    region = sides[0][:, None] * 3 + sides[1][None, :]
    windows = to_windows(region[None, :, :, None], window).squeeze(-1)
    apart = windows[:, :, None] != windows[:, None, :]
    return torch.zeros(apart.shape).masked_fill(apart, float("-inf"))


class RelativePositionBias(nn.Module):
    """A learned bias for each head and each distance between two tokens of a window."""

    def __init__(self, heads: int, window: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
        place = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        apart = place[:, None] - place[None, :] + window - 1
        index = apart[..., 0] * (2 * window - 1) + apart[..., 1]
        self.register_buffer("index", index, persistent=False)

    def forward(self) -> Tensor:
        """``[heads, n, n]``."""
        return self.table[self.index].permute(2, 0, 1)


class WindowAttention(nn.Module):
    def __init__(self, features: int, heads: int, window: int) -> None:
        super().__init__()
        self.head_dim = features // heads
        self.q_proj = nn.Linear(features, features)
        self.k_proj = nn.Linear(features, features)
        self.v_proj = nn.Linear(features, features)
        self.o_proj = nn.Linear(features, features)
        self.bias = RelativePositionBias(heads, window)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Windows ``[B * windows, n, C]``, and a mask ``[windows, n, n]`` that images share."""
        count, tokens, _ = x.shape
        heads = (count, tokens, -1, self.head_dim)
        q, k, v = (
            proj(x).view(heads).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        bias = self.bias().unsqueeze(0)
        if mask is not None:
            bias = (bias + mask.unsqueeze(1)).repeat(count // mask.shape[0], 1, 1, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o_proj(y.transpose(1, 2).reshape(count, tokens, -1))


class MLP(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 4 * features)
        self.fc2 = nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class SwinBlock(nn.Module):
    """Attention within windows and an MLP, on a map of a fixed size."""

    mask: Tensor | None

    def __init__(
        self, features: int, heads: int, window: int, size: tuple[int, int], shifted: bool
    ) -> None:
        super().__init__()
        # A map of one window has nothing to shift.
        self.shift = window // 2 if shifted and min(size) > window else 0
        self.window = window
        self.norm1 = nn.LayerNorm(features)
        self.attention = WindowAttention(features, heads, window)
        self.norm2 = nn.LayerNorm(features)
        self.mlp = MLP(features)
        mask = shift_mask(*size, window, self.shift) if self.shift else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        _, height, width, _ = x.shape
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = self.attention(to_windows(y, self.window), self.mask)
        y = from_windows(y, self.window, height, width)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


def make_blocks(config: SwinUNetConfig, stage: int) -> nn.ModuleList:
    return nn.ModuleList(
        SwinBlock(
            config.features(stage),
            config.heads[stage],
            config.window,
            config.size(stage),
            shifted=index % 2 == 1,
        )
        for index in range(config.depths[stage])
    )


class PatchMerging(nn.Module):
    """Of four neighbours one token, with twice the features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * features)
        self.reduce = nn.Linear(4 * features, 2 * features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        return self.reduce(self.norm(torch.cat(corners, -1)))


class PatchExpanding(nn.Module):
    """Of one token ``side * side`` neighbours, of ``out_features`` each."""

    def __init__(self, features: int, out_features: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.expand = nn.Linear(features, side * side * out_features, bias=False)
        self.norm = nn.LayerNorm(out_features)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        x = self.expand(x).view(batch, height, width, self.side, self.side, -1)
        x = x.transpose(2, 3).reshape(batch, height * self.side, width * self.side, -1)
        return self.norm(x)


class EncoderStage(nn.Module):
    """Blocks, which leave a map for the decoder, and their merged patches for the next stage."""

    def __init__(self, config: SwinUNetConfig, stage: int) -> None:
        super().__init__()
        self.blocks = make_blocks(config, stage)
        self.merge = PatchMerging(config.features(stage))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, self.merge(x)


class DecoderStage(nn.Module):
    """Expanded patches joined with the encoder's map of that size, and blocks."""

    def __init__(self, config: SwinUNetConfig, stage: int) -> None:
        super().__init__()
        features = config.features(stage)
        self.expand = PatchExpanding(2 * features, features, side=2)
        self.join = nn.Linear(2 * features, features)
        self.blocks = make_blocks(config, stage)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.join(torch.cat([self.expand(x), skip], -1))
        for block in self.blocks:
            x = block(x)
        return x


class SwinUNet(nn.Module):
    """Scores for each class of each pixel.

    Args:
        config: the sizes.
        seed: of the initial weights, which depend on nothing else.

    Example::

        >>> model = SwinUNet(SwinUNetConfig(classes=3))
        >>> model(torch.randn(2, 1, 96, 96)).shape
        torch.Size([2, 96, 96, 3])
    """

    def __init__(self, config: SwinUNetConfig, seed: int = 0) -> None:
        super().__init__()
        last = len(config.depths) - 1
        self.patches = nn.Conv2d(config.channels, config.dim, config.patch, stride=config.patch)
        self.norm = nn.LayerNorm(config.dim)
        self.encoder = nn.ModuleList(EncoderStage(config, stage) for stage in range(last))
        self.bottom = make_blocks(config, last)
        self.decoder = nn.ModuleList(DecoderStage(config, s) for s in reversed(range(last)))
        self.to_pixels = PatchExpanding(config.dim, config.dim, side=config.patch)
        self.head = nn.Linear(config.dim, config.classes)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.ndim > 1:
                # A sum of many products of unit variance has unit variance again.
                spread = 0.02 if name.endswith("table") else param[0].numel() ** -0.5
                param.copy_(torch.empty(param.shape).normal_(0, spread, generator=generator))
            else:
                param.fill_(1.0 if name.endswith("weight") else 0.0)

    def forward(self, images: Tensor) -> Tensor:
        """Images ``[B, channels, H, W]`` to scores ``[B, H, W, classes]``."""
        x = self.norm(self.patches(images).permute(0, 2, 3, 1))
        skips = []
        for stage in self.encoder:
            skip, x = stage(x)
            skips.append(skip)
        for block in self.bottom:
            x = block(x)
        for stage in self.decoder:
            x = stage(x, skips.pop())
        return self.head(self.to_pixels(x))
