// fp8kvctl: commands.h has what it does.
#include <iostream>

#include "client/cc/ctl/commands.h"

int main(int argc, char** argv) {
  return fp8kvd::ctl::RunCommandLine({argv + 1, argv + argc}, std::cout, std::cerr);
}
