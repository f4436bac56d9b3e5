// Pictures of a step.
#include <algorithm>
#include <array>
#include <sstream>

#include "base/chrome_trace.h"
#include "base/error.h"
#include "convoy/pipeline.h"

namespace convoy {
namespace {

using Kind = PipelineSpan::Kind;

std::string name_of(const PipelineSpan& span) {
  return concat(span.kind == Kind::kForward ? "F" : "B", span.micro_batch);
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      default: out += c;
    }
  }
  return out;
}

}  // namespace

std::string PipelineTimeline::svg() const {
  constexpr double kLeft = 120, kWidth = 960, kRow = 40, kHigh = 28;
  PipelineSpan::Time first = PipelineSpan::Time::max(), last = PipelineSpan::Time::min();
  for (const PipelineSpan& span : spans) {
    first = std::min(first, span.begin);
    last = std::max(last, span.end);
  }
  const auto us = [](auto duration) {
    return std::chrono::duration<double, std::micro>(duration).count();
  };
  const double all = spans.empty() ? 1 : std::max(1.0, us(last - first));
  std::ostringstream out;
  out.precision(6);
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" font-family=\"sans-serif\" "
         "font-size=\"12\" style=\"background:#fff\" "
      << "width=\"" << kLeft + kWidth + 20 << "\" height=\""
      << kRow * static_cast<double>(workers.size()) + 40 << "\">\n";
  for (std::size_t s = 0; s < workers.size(); ++s) {
    out << "<text x=\"8\" y=\"" << kRow * static_cast<double>(s) + 28 << "\">" << s << ": "
        << escaped(workers[s]) << "</text>\n";
  }
  for (const PipelineSpan& span : spans) {
    const double x = kLeft + kWidth * us(span.begin - first) / all;
    const double wide = std::max(1.0, kWidth * us(span.end - span.begin) / all);
    const double y = kRow * static_cast<double>(span.stage) + 10;
    const bool forwards = span.kind == Kind::kForward;
    out << "<rect x=\"" << x << "\" y=\"" << y << "\" width=\"" << wide << "\" height=\"" << kHigh
        << "\" fill=\"" << (forwards ? "#7ab4e8" : "#f0b46e") << "\" stroke=\"#fff\"><title>"
        << name_of(span) << ": " << us(span.end - span.begin) << " us</title></rect>\n";
    if (wide > 18) {
      out << "<text x=\"" << x + wide / 2 << "\" y=\"" << y + 18 << "\" text-anchor=\"middle\">"
          << name_of(span) << "</text>\n";
    }
  }
  out << "<text x=\"" << kLeft << "\" y=\"" << kRow * static_cast<double>(workers.size()) + 28
      << "\">0</text>\n<text x=\"" << kLeft + kWidth << "\" y=\""
      << kRow * static_cast<double>(workers.size()) + 28 << "\" text-anchor=\"end\">" << all / 1000
      << " ms</text>\n</svg>\n";
  return out.str();
}

std::string PipelineTimeline::chrome_trace() const {
  std::vector<std::string> processes;
  for (std::size_t s = 0; s < workers.size(); ++s) {
    ChromeTrace trace(static_cast<int>(s), concat("stage ", s, ", ", workers[s]));
    for (const PipelineSpan& span : spans) {
      if (span.stage == s) trace.span("stage", name_of(span), span.begin, span.end);
    }
    processes.push_back(trace.text());
  }
  return convoy::chrome_trace(processes);
}

}  // namespace convoy
