"""The models of the benchmarks of training: those of models.h, made in the same order."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Bottleneck(nn.Module):
    """Of ResNet-50: 1x1, 3x3, 1x1, and a shortcut past them."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.shortcut = None
        if channels != 4 * width or stride != 1:
            self.shortcut = nn.Sequential(conv(channels, 4 * width, 1, stride),
                                          nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (self.shortcut(x) if self.shortcut else x))


def conv(channels, width, kernel, stride=1):
    return nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)


def mlp_100m():
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(4096, 4096), nn.ReLU())))
    return net, torch.randn(8, 4096)


def gpt(vocabulary, width, layers, heads):
    layers = [nn.Embedding(vocabulary, width), *(Block(width, heads) for _ in range(layers))]
    net = nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, vocabulary))
    return net, torch.randint(vocabulary, (2, 128))


def resnet_50():
    layers = [conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(blocks):
            layers.append(Bottleneck(channels, width, stride if i == 0 else 1))
            channels = 4 * width
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return net, torch.randn(4, 3, 224, 224)


MODELS = {
    "mlp-100m": mlp_100m,
    "gpt-10m": lambda: gpt(65, 384, 6, 6),
    "gpt-52m": lambda: gpt(2048, 640, 10, 10),
    "resnet-50": resnet_50,
}
