#pragma once

#include <torch/torch.h>

// A GPT of about a million parameters that predicts the next character.
struct GptOptions {
  int64_t vocabulary = 96, width = 128, heads = 4, layers = 5, context = 64;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptOptions& o)
      : heads(o.heads),
        norm1(
            register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))),
        norm2(
            register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))),
        qkv(register_module("qkv", torch::nn::Linear(o.width, 3 * o.width))),
        mix(register_module("mix", torch::nn::Linear(o.width, o.width))),
        up(register_module("up", torch::nn::Linear(o.width, 4 * o.width))),
        down(register_module("down", torch::nn::Linear(4 * o.width, o.width))) {}

  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0), time = x.size(1), width = x.size(2);
    auto parts =
        qkv(norm1(x)).view({batch, time, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    auto seen = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + mix(seen.transpose(1, 2).reshape({batch, time, width}));
    return x + down(torch::gelu(up(norm2(x))));
  }

  int64_t heads;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, mix, up, down;
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& o)
      : tokens(register_module("tokens", torch::nn::Embedding(o.vocabulary, o.width))),
        places(register_module("places", torch::nn::Embedding(o.context, o.width))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))),
        head(register_module("head", torch::nn::Linear(o.width, o.vocabulary))) {
    for (int64_t i = 0; i < o.layers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(o)));
    }
    const torch::NoGradGuard no_grad;
    for (auto& item : named_parameters()) {
      if (item.value().dim() == 2) item.value().normal_(0, 0.02);
    }
  }

  torch::Tensor forward(const torch::Tensor& text) {
    auto x = tokens(text) + places(torch::arange(text.size(1)));
    for (auto& block : blocks) x = block(x);
    return head(norm(x));
  }

  torch::nn::Embedding tokens, places;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
  std::vector<Block> blocks;
};
TORCH_MODULE(Gpt);
