#pragma once

#include <torch/torch.h>

#include <stdexcept>
#include <string>

// The models of bench/ddp.py, as bench/peer_ddp.py has them: the same layers, made in the same
// order, so that the same seed gives the same first loss.
namespace bench {

struct Model {
  torch::nn::Sequential net;
  torch::Tensor data;
};

inline Model mlp_100m() {
  torch::nn::Sequential net;
  for (int i = 0; i < 6; ++i) {
    net->push_back(torch::nn::Linear(4096, 4096));
    net->push_back(torch::nn::ReLU());
  }
  return {net, torch::randn({8, 4096})};
}

inline torch::nn::LayerNorm layer_norm(std::int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t number_of_heads)
      : heads(number_of_heads),
        first(register_module("first", layer_norm(width))),
        second(register_module("second", layer_norm(width))),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        out(register_module("out", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}

  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = qkv(first(x))
                           .view({batch, length, 3, heads, width / heads})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const auto y = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + out(y.transpose(1, 2).reshape({batch, length, width}));
    return x + down(torch::gelu(up(second(x))));
  }

  std::int64_t heads;
  torch::nn::LayerNorm first, second;
  torch::nn::Linear qkv, out, up, down;
};
TORCH_MODULE(Block);

struct GptOptions {
  std::int64_t vocabulary, width, layers, heads;
};

inline Model gpt(const GptOptions& o) {
  torch::nn::Sequential net(torch::nn::Embedding(o.vocabulary, o.width));
  for (std::int64_t i = 0; i < o.layers; ++i) net->push_back(Block(o.width, o.heads));
  net->push_back(layer_norm(o.width));
  net->push_back(torch::nn::Linear(o.width, o.vocabulary));
  return {net, torch::randint(o.vocabulary, {2, 128}, torch::kLong)};
}

inline torch::nn::Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t kernel,
                              std::int64_t stride = 1) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

// Of ResNet-50: 1x1, 3x3, 1x1, and a shortcut past them.
struct BottleneckImpl : torch::nn::Module {
  BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride)
      : conv1(register_module("conv1", conv(in, width, 1))),
        bn1(register_module("bn1", torch::nn::BatchNorm2d(width))),
        conv2(register_module("conv2", conv(width, width, 3, stride))),
        bn2(register_module("bn2", torch::nn::BatchNorm2d(width))),
        conv3(register_module("conv3", conv(width, 4 * width, 1))),
        bn3(register_module("bn3", torch::nn::BatchNorm2d(4 * width))) {
    if (in == 4 * width && stride == 1) return;
    shortcut = register_module(
        "shortcut",
        torch::nn::Sequential(conv(in, 4 * width, 1, stride), torch::nn::BatchNorm2d(4 * width)));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::relu(bn1(conv1(x)));
    y = torch::relu(bn2(conv2(y)));
    y = bn3(conv3(y));
    return torch::relu(y + (shortcut.is_empty() ? x : shortcut->forward(x)));
  }

  torch::nn::Conv2d conv1;
  torch::nn::BatchNorm2d bn1;
  torch::nn::Conv2d conv2;
  torch::nn::BatchNorm2d bn2;
  torch::nn::Conv2d conv3;
  torch::nn::BatchNorm2d bn3;
  torch::nn::Sequential shortcut{nullptr};
};
TORCH_MODULE(Bottleneck);

inline Model resnet_50() {
  torch::nn::Sequential net(
      conv(3, 64, 7, 2), torch::nn::BatchNorm2d(64), torch::nn::ReLU(),
      torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2).padding(1)));
  struct Stage {
    std::int64_t width, blocks, stride;
  };
  std::int64_t channels = 64;
  for (const Stage& stage :
       {Stage{64, 3, 1}, Stage{128, 4, 2}, Stage{256, 6, 2}, Stage{512, 3, 2}}) {
    for (std::int64_t i = 0; i < stage.blocks; ++i) {
      net->push_back(Bottleneck(channels, stage.width, i == 0 ? stage.stride : 1));
      channels = 4 * stage.width;
    }
  }
  net->push_back(torch::nn::AdaptiveAvgPool2d(1));
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(channels, 1000));
  return {net, torch::randn({4, 3, 224, 224})};
}

inline Model make_model(const std::string& name) {
  torch::manual_seed(0);
  if (name == "mlp-100m") return mlp_100m();
  if (name == "gpt-10m") return gpt({.vocabulary = 65, .width = 384, .layers = 6, .heads = 6});
  if (name == "gpt-52m") return gpt({.vocabulary = 2048, .width = 640, .layers = 10, .heads = 10});
  if (name == "resnet-50") return resnet_50();
  throw std::invalid_argument("there is no model " + name);
}

}  // namespace bench
