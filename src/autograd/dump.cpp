// What a context looks like on all of its workers, for people.
#include <map>
#include <set>
#include <sstream>

#include "autograd/functions.h"
#include "autograd/registry.h"
#include "base/error.h"
#include "convoy/autograd.h"

namespace convoy::autograd {
namespace {

using detail::ContextReport;
using detail::MessageReport;
using detail::Registry;
using detail::WorkerId;

using namespace std::chrono_literals;

struct Reports {
  std::map<WorkerId, ContextReport> all;
  std::map<WorkerId, std::string> silent;  // those who did not answer, and why

  bool has(WorkerId worker) const { return all.contains(worker) || silent.contains(worker); }
};

// From this worker, and from those that it and others sent something to.
Reports gather(Registry& registry, ContextId id) {
  const rpc::detail::RecorderScope not_recorded(nullptr);
  const rpc::Session session(registry.session());
  Reports reports;
  std::set<WorkerId> next{registry.self()};
  while (!next.empty()) {
    std::vector<std::pair<WorkerId, rpc::Future<ContextReport>>> asked;
    for (const WorkerId worker : next) {
      try {
        asked.emplace_back(
            worker, session.to(worker, {.timeout = 10s}).rpc_async<detail::report_context>(id));
      } catch (const Error& error) {
        reports.silent.emplace(worker, error.what());
      }
    }
    next.clear();
    for (auto& [worker, answer] : asked) {
      try {
        reports.all.emplace(worker, answer.wait());
      } catch (const Error& error) {
        reports.silent.emplace(worker, error.what());
      }
    }
    for (const auto& [worker, report] : reports.all) {
      for (const WorkerId known : report.known) {
        if (!reports.has(known)) next.insert(known);
      }
    }
  }
  return reports;
}

// Whether any pass takes part in this message.
bool is_active(const ContextReport& report, std::uint64_t message, bool* missing) {
  bool active = false;
  for (const auto& pass : report.passes) {
    for (const auto each : pass.active) active = active || each == message;
    for (const auto each : pass.missing) *missing = *missing || each == message;
  }
  return active;
}

std::string label_of(const MessageReport& each) {
  return concat(each.reply ? "reply of " : "call of ", each.function);
}

// Within quotes of Graphviz.
std::string escaped(std::string_view text) {
  std::string result;
  for (const char each : text) {
    if (each == '"' || each == '\\') result += '\\';
    result += each == '\n' ? ' ' : each;
  }
  return result;
}

std::string as_text(const Registry& registry, ContextId id, const Reports& reports) {
  std::ostringstream out;
  out << "context " << id << "\n";
  for (const auto& [worker, why] : reports.silent) {
    out << registry.name_of(worker) << ": cannot be asked: " << why << "\n";
  }
  for (const auto& [worker, report] : reports.all) {
    out << registry.name_of(worker) << ":";
    if (!report.there) {
      out << " does not have it\n";
      continue;
    }
    out << " " << report.gradients << " gradients\n";
    for (const auto& each : report.sends) {
      bool missing = false;
      const bool active = is_active(report, each.message, &missing);
      out << "  send " << each.message << " to " << registry.name_of(each.peer) << ", "
          << label_of(each) << ":";
      for (const auto& node : each.nodes) out << " " << node;
      if (active) out << (missing ? " [active, waits for its gradient]" : " [active]");
      out << "\n";
    }
    for (const auto& each : report.recvs) {
      out << "  recv " << each.message << " from " << registry.name_of(each.peer) << ", "
          << label_of(each) << ": " << each.tensors << " tensors\n";
    }
    for (const auto& pass : report.passes) {
      out << "  pass " << pass.pass.number << " of " << registry.name_of(pass.pass.root) << ": "
          << pass.state << ", " << pass.active.size() << " active sends, waits for "
          << pass.missing.size() << "\n";
    }
  }
  return out.str();
}

std::string as_graph(const Registry& registry, ContextId id, const Reports& reports) {
  std::ostringstream out;
  out << "digraph context_" << id << " {\n  rankdir=LR;\n  node [shape=box];\n";
  for (const auto& [worker, why] : reports.silent) {
    out << "  subgraph cluster_" << worker << " {\n    style=dashed;\n    label=\""
        << escaped(registry.name_of(worker)) << "\";\n    silent_" << worker
        << " [label=\"cannot be asked\", tooltip=\"" << escaped(why) << "\"];\n  }\n";
  }
  for (const auto& [worker, report] : reports.all) {
    out << "  subgraph cluster_" << worker << " {\n    label=\""
        << escaped(registry.name_of(worker)) << "\";\n";
    for (const auto& each : report.sends) {
      bool missing = false;
      const bool active = is_active(report, each.message, &missing);
      out << "    send_" << each.message << " [label=\"send: " << escaped(label_of(each)) << "\""
          << (missing  ? ", style=filled, fillcolor=orange"
              : active ? ", style=filled, fillcolor=lightblue"
                       : "")
          << "];\n";
      for (std::size_t i = 0; i < each.nodes.size(); ++i) {
        out << "    send_" << each.message << "_" << i << " [label=\"" << escaped(each.nodes[i])
            << "\", shape=ellipse];\n    send_" << each.message << " -> send_" << each.message
            << "_" << i << ";\n";
      }
    }
    for (const auto& each : report.recvs) {
      out << "    recv_" << each.message << " [label=\"recv: " << escaped(label_of(each))
          << "\"];\n";
    }
    out << "  }\n";
  }
  // Gradients go from where a message arrived to where it came from.
  for (const auto& [worker, report] : reports.all) {
    for (const auto& each : report.recvs) {
      out << "  recv_" << each.message << " -> send_" << each.message << ";\n";
    }
  }
  out << "}\n";
  return out.str();
}

}  // namespace

std::string ContextRef::dump(DumpFormat format) const {
  Registry& registry = state_->registry();
  const auto reports = gather(registry, id());
  return format == DumpFormat::kText ? as_text(registry, id(), reports)
                                     : as_graph(registry, id(), reports);
}

}  // namespace convoy::autograd
