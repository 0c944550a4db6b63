# Every outside library, found once, all from Debian 12's packages (deploy/packages.txt lists them).
find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(GTest REQUIRED)
find_package(benchmark REQUIRED)
find_package(hwy REQUIRED)
if(FP8KVD_SERVER)
  find_package(gRPC REQUIRED)
  find_package(OpenSSL REQUIRED)
  find_package(spdlog REQUIRED)
  find_package(civetweb REQUIRED)
  find_package(prometheus-cpp REQUIRED)
  find_package(PkgConfig REQUIRED)
endif()

# Debian ships no CMake file for this one.
find_library(XXHASH_LIBRARY xxhash REQUIRED)
find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
add_library(xxhash::xxhash UNKNOWN IMPORTED)
# Where the library can pick the widest vectors at run time; the plain functions stay at SSE2.
include(CheckLibraryExists)
find_path(XXHASH_DISPATCH_DIR xxh_x86dispatch.h)
check_library_exists(${XXHASH_LIBRARY} XXH3_64bits_withSeed_dispatch "" XXHASH_HAS_DISPATCH)
if(XXHASH_DISPATCH_DIR AND XXHASH_HAS_DISPATCH)
  target_compile_definitions(xxhash::xxhash INTERFACE FP8KVD_XXHASH_DISPATCH)
endif()
set_target_properties(xxhash::xxhash PROPERTIES
  IMPORTED_LOCATION ${XXHASH_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${XXHASH_INCLUDE_DIR})
