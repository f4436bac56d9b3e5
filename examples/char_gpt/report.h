#pragma once

#include <string>
#include <vector>

// The loss of each step, and when the step had ended.
struct Curve {
  std::string name = {};
  std::vector<double> seconds = {};
  std::vector<double> losses = {};

  double seconds_per_step() const;  // median of the second half: the first warms up
};

struct Progress {
  int step = 0;
  double seconds = 0, limit = 0;  // of training
  double loss = 0;
  double tokens_per_second = 0;
  double waiting = 0;  // share of the step in which this rank only waits for gradients
};
// "[######....]  310 steps, 42 of 110 s, loss 1.912, 21034 tokens/s, waiting for gradients 2.1 %".
std::string progress_line(const Progress& progress);

// "▇▆▅▄▃▂▁": the losses in one line of text, `width` characters wide.
std::string sparkline(const std::vector<double>& losses, int width = 60);

// At most `most` round numbers (1, 2 or 5 times a power of ten) from low to high.
std::vector<double> ticks(double low, double high, int most);

// Loss over time as an SVG picture with axes and a legend.
void write_svg(const std::string& path, const std::vector<Curve>& curves, const std::string& title);
