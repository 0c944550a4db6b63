// server/rpc/tls.h: the credentials of the gRPC port: none, TLS, or TLS with certificates of the
// clients too.
//
// Promises: files that change are read at the next handshake, a second later at most; connections
//   that stand keep theirs, so no call is dropped. Files that cannot be taken (half written, key
//   and certificate that do not belong together) leave the ones before in use, and `warn` is told
//   once for each change. Contents of files stand in no error.
// Does not manage: who may call what (access.h).
// Threads: handshakes are on gRPC's threads; `warn` is called from them.
// Errors: NOT_FOUND, INVALID_ARGUMENT: the files at start.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/security/server_credentials.h"

#include "config/options.h"

namespace fp8kvd::rpc {

using Warn = std::function<void(const std::string& text)>;

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeCredentials(
    const config::SecurityOptions& options, Warn warn);

// Whether these are a certificate chain, its private key and, if not empty, authorities; all PEM.
absl::Status CheckPem(const std::string& chain, const std::string& key,
                      const std::string& authorities);

}  // namespace fp8kvd::rpc
