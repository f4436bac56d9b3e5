#include "coll/shape.h"

#include "base/concat.h"
#include "coll/call.h"

namespace convoy::coll {

std::string to_string(const Shape& shape) {
  if (!shape.given) return "";
  std::string text = "[";
  for (const std::int64_t size : shape.span()) text += concat(text.size() == 1 ? "" : ", ", size);
  return text + "]";
}

void ShapeList::add(const Shape& shape) {
  entries_.push_back({sizes_.size(), shape.dims, shape.given});
  sizes_.insert(sizes_.end(), shape.sizes, shape.sizes + shape.dims);
}

Shape ShapeList::at(std::size_t i) const {
  const Entry& entry = entries_[i];
  return {sizes_.data() + entry.begin, entry.dims, entry.given};
}

std::string to_string(const ShapeList& shapes) {
  std::string text;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const std::string one = to_string(shapes.at(i));
    if (!one.empty()) text += concat(text.empty() ? "" : ", ", one);
  }
  return text;
}

std::string Call::describe_shapes() const {
  constexpr std::size_t kMost = 1000;
  const bool several = lists && lists->shapes.size() > 0;
  std::string text = several ? to_string(lists->shapes) : to_string(shape);
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  if (text.empty()) return text;
  return concat(several ? "tensors of shapes " : "a tensor of shape ", text);
}

}  // namespace convoy::coll
