// What the parts of the check program share (check.cpp, check_sampling.cpp).
#pragma once

#include <random>
#include <vector>

using Vector = std::vector<float>;

Vector random_vector(size_t size, float mean, float spread, std::mt19937& random);

// Prints what does not hold, and has the program fail.
void expect(bool holds, const char* what);

void check_sampling(int num_rows, int vocabulary);
