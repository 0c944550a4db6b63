// client/cc/ctl/commands.h: the subcommands of fp8kvctl, one function and one file each, and the
// table that names them.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "client/cc/ctl/invocation.h"

namespace fp8kvd::ctl {

const Command& InfoCommand();
const Command& PlanCommand();
const Command& AccuracyCommand();
const Command& StatCommand();
const Command& TopCommand();
const Command& FreeCommand();
const Command& ReplayCommand();
const Command& BenchCommand();

// In the order of the help.
std::vector<const Command*> Commands();

// Everything that fp8kvctl does: words are its arguments, results go to out, errors and progress to
// err. Gives the exit code.
int RunCommandLine(const std::vector<std::string>& words, std::ostream& out, std::ostream& err);

}  // namespace fp8kvd::ctl
