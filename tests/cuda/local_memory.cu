// Indexes an array of its own with a number known only at run time, so that it cannot stay in
// registers.
__global__ void LocalMemory(float* x, int n) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = x[i * n];
  for (int i = 0; i < n; ++i) kept[(i * 7) % 64] *= 2.0F;
  for (int i = 0; i < 64; ++i) x[i] = kept[i];
}
