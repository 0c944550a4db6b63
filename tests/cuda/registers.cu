__global__ void Registers(float* x) { x[threadIdx.x] *= 2.0F; }
