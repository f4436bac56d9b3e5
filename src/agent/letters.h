#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/id.h"
#include "transport/endpoint.h"

// What agents write to each other. docs/internals/wire.md has the bytes. Numbers are little-endian;
// fields that are not used are zero, and are refused if they are not.
namespace convoy::agent {

enum class LetterType : transport::LetterKind {
  kHello = 1,      // who I am, and what I have to call
  kCall = 2,       // CallHead, body; pieces
  kReply = 3,      // ReplyHead, body; pieces
  kError = 4,      // ReplyHead, ErrorFields, or these in a piece
  kCancel = 5,     // CancelHead
  kGoodbye = 6,    // nothing more comes
  kGather = 7,     // GatherHead, value, or this in a piece
  kGatherAsk = 8,  // GatherHead: the sender still waits for the receiver's value
};
// Those from here on are other layers'.
inline constexpr transport::LetterKind kFirstOtherLetter = 64;

inline constexpr std::string_view kHelloMagic = "CVA1";
inline constexpr std::uint64_t kNoLimit = UINT64_MAX;

struct CallHead {
  std::uint32_t flags = 0;      // CallFlags
  std::uint32_t function = 0;   // its place in the callee's table
  std::uint64_t number = 0;     // counts the caller's calls to this callee, from 1
  std::uint64_t remaining = 0;  // nanoseconds until the caller gives up; kNoLimit
  std::uint32_t slot = 0;       // the caller's own, for the answer
  std::uint32_t behind = 0;     // calls from `number - behind` on are under way; older ones are not
};
static_assert(sizeof(CallHead) == 32);

struct ReplyHead {
  std::uint32_t zero = 0;
  std::uint32_t slot = 0;
  std::uint64_t number = 0;
};
static_assert(sizeof(ReplyHead) == 16);

struct CancelHead {
  std::uint64_t number = 0;
  std::uint64_t floor = 0;  // older calls are not under way
};
static_assert(sizeof(CancelHead) == 16);

struct GatherHead {
  std::uint64_t group = 0;   // a hash of who takes part
  std::uint64_t number = 0;  // of gathers of this group, from 1
};
static_assert(sizeof(GatherHead) == 16);

// A function of a worker, as it tells others.
struct TableEntry {
  std::string name;
  std::string signature;
  std::uint64_t hash = 0;
};

struct Hello {
  Id session;                // what all workers of a session know, and others do not
  std::uint32_t worker = 0;  // rank
  std::string name;
  bool asks = false;   // wants one in return
  bool knows = false;  // has had the receiver's
  std::vector<TableEntry> table = {};
};

inline constexpr std::size_t kMostName = 127;
inline constexpr std::size_t kMostFunctions = std::size_t{1} << 20;

// The head of a hello; the table is its piece.
std::string encode_hello(const Hello& hello);
std::string encode_table(std::span<const TableEntry> table);
// These throw kInvalidArgument.
Hello decode_hello(std::span<const std::byte> head, std::span<const std::byte> table);

struct ErrorFields {
  std::uint32_t kind = 0;  // ErrorKind
  std::string type;
  std::string text;
};
std::string encode_error(const ErrorFields& error);
ErrorFields decode_error(std::span<const std::byte> bytes);

// What the head of a letter begins with. Throws kInvalidArgument for what is too short.
template <class T>
T decode_head(std::span<const std::byte> head, const char* what);

}  // namespace convoy::agent
