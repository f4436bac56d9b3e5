#pragma once

#include <string>
#include <vector>

// One line that is drawn over itself: a bar, and what is known so far.
std::string progress_line(int step, int steps, double loss, double tokens_per_second,
                          double exposed_share);

// "▇▆▅▄▃▂▁": the curve in one line of text, `width` characters wide.
std::string sparkline(const std::vector<double>& values, int width = 60);

// The curve as a picture.
void write_svg(const std::string& path, const std::vector<double>& losses,
               const std::string& title);
