#pragma once

#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "convoy/detail/rpc_message.h"
#include "convoy/fields.h"

// What types can be passed, and how functions are told apart. For convoy/rpc_function.h; nothing
// here is for direct use.
namespace convoy::rpc::detail {

// Whether values of this type can be passed at all.
template <class T>
consteval bool is_passable() {
  using namespace convoy::detail;
  if constexpr (kHeld<T> || std::is_enum_v<T> || HasFields<T>) {
    return true;  // the fields are checked when they are passed
  } else if constexpr (kIsVector<T> || kIsOptional<T>) {
    return is_passable<typename T::value_type>();
  } else if constexpr (kIsMap<T>) {
    return is_passable<typename T::key_type>() && is_passable<typename T::mapped_type>();
  } else if constexpr (kIsVariant<T>) {
    return []<class... Kinds>(std::variant<Kinds...>*) {
      return (is_passable<Kinds>() && ...);
    }(static_cast<T*>(nullptr));
  } else if constexpr (Parts<T>) {
    return []<std::size_t... i>(std::index_sequence<i...>) {
      return (is_passable<std::remove_const_t<std::tuple_element_t<i, T>>>() && ...);
    }(std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    return false;
  }
}

// Describes how a type is encoded: its name and its fields. Processes compare a hash of the text,
// so a struct that differs between two programs is detected.
class Describer {
 public:
  template <class T>
  void add() {
    using namespace convoy::detail;
    if constexpr (kIsRRef<T>) {
      text_ += "convoy::RRef";
      add_list<typename T::Value>('<', '>');
    } else if constexpr (kHeld<T> || std::is_void_v<T> || std::is_enum_v<T>) {
      name(typeid(T));
    } else if constexpr (HasFields<T>) {
      name(typeid(T));
      if (enter(typeid(T))) {
        add_all(static_cast<decltype(fields_of(std::declval<T&>()))*>(nullptr), '{', '}');
        leave();
      }
    } else if constexpr (kIsVector<T> || kIsOptional<T>) {
      text_ += kIsVector<T> ? "std::vector" : "std::optional";
      add_list<typename T::value_type>('<', '>');
    } else if constexpr (kIsMap<T>) {
      text_ += "std::map";
      add_list<typename T::key_type, typename T::mapped_type>('<', '>');
    } else if constexpr (kIsVariant<T>) {
      text_ += "std::variant";
      add_all(static_cast<T*>(nullptr), '<', '>');
    } else if constexpr (Parts<T>) {
      [this]<std::size_t... i>(std::index_sequence<i...>) {
        this->template add_list<std::remove_const_t<std::tuple_element_t<i, T>>...>('(', ')');
      }(std::make_index_sequence<std::tuple_size_v<T>>());
    } else {
      text_ += "object ";
      name(typeid(T));
    }
  }
  template <class... T>
  void add_list(char open, char close) {
    text_ += open;
    [[maybe_unused]] bool first = true;
    ((text_ += first ? "" : ", ", first = false, add<std::remove_cvref_t<T>>()), ...);
    text_ += close;
  }
  std::string& text() { return text_; }
  void add_name(const std::type_info& type) { name(type); }

 private:
  template <template <class...> class List, class... T>
  void add_all(List<T...>*, char open, char close) {
    add_list<T...>(open, close);
  }
  void name(const std::type_info& type);
  bool enter(const std::type_info& type);  // false: the type contains itself
  void leave() { inside_.pop_back(); }

  std::string text_;
  std::vector<const std::type_info*> inside_;
};

}  // namespace convoy::rpc::detail
